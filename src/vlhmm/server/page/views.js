// Small builders of page elements; text always goes in as text, never as markup.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, what] of Object.entries(value)) node.style.setProperty(key, what);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const percent = (p) => (p >= 0.0001 ? (100 * p).toFixed(2) + " %" : p.toExponential(1));

export function bars(title, entries, labelOf, level = "h3") {
  if (!entries || !entries.length) return el("section", {}, el(level, {}, title), el("p", { class: "muted" }, "none"));
  const most = Math.max(...entries.map((entry) => entry.probability), 1e-12);
  return el("section", {}, el(level, {}, title), el("ol", { class: "bars" }, entries.map((entry) => {
    const share = (100 * entry.probability) / most;
    return el("li", {}, el("span", { class: "value" }, percent(entry.probability)),
      el("span", { class: "label", css: { background: `linear-gradient(to right, rgba(var(--heat), .22) ${share}%, transparent ${share}%)` } }, labelOf(entry)));
  })));
}

export const link = (view, query, text) => el("a", { href: "#" + view + "?" + new URLSearchParams(query) }, text);
export const wordLink = (entry) => link("inside", { kind: "word", of: entry.word }, entry.word);
export const stateLink = (entry) => el("span", {}, link("inside", { kind: "state", of: entry.state }, "state " + entry.state), " ", (entry.words || []).join(" "));
export const blockLink = (entry) => el("span", {}, link("inside", { kind: "block", of: entry.block }, "block " + entry.block), " ", (entry.words || []).join(" "));

export function field(label, name, value, options = {}) {
  const { small, choices, ...more } = options;
  const input = choices
    ? el("select", { name, ...more }, choices.map((choice) => el("option", { value: choice, selected: choice === value }, choice)))
    : el("input", { name, value: value ?? "", autocomplete: "off", spellcheck: "false", ...more });
  return el("label", { class: small ? "small" : null }, label, input);
}
