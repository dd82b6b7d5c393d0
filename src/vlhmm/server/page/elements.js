// Builders of page elements. Text always goes in as text, never as markup.
"use strict";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, what] of Object.entries(value)) node.style.setProperty(key, what);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Two or three figures: 12.3 %, 0.0042 %, and powers of ten below a ten-thousandth of a percent.
function percent(p) {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  if (value > 0 && value < 1e-4) return value.toExponential(1).replace("e-", "·10⁻").replace(/⁻(\d+)/, (_, n) => "⁻" + [...n].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]).join("")) + " %";
  return (value >= 10 ? value.toFixed(1) : value >= 0.1 ? value.toFixed(2) : value.toPrecision(2)) + " %";
}
const count = (n) => Number(n).toLocaleString("en-US");

// A ranked list; the bars are shares of the largest entry.
function bars(entries, nameOf, large = false) {
  if (!entries || !entries.length) return el("p", { class: "muted" }, "None.");
  const most = Math.max(...entries.map((entry) => entry.probability), 1e-300);
  return el("ol", { class: large ? "bars large" : "bars" }, entries.map((entry) => el("li", { css: { "--share": (100 * entry.probability) / most + "%" } },
    el("span", { class: "name" }, nameOf(entry)), el("span", { class: "value" }, percent(entry.probability)))));
}

// Byte-level tokenizers spell every byte as a letter, a blank as "Ġ". What is no such letter stands for itself.
const BYTE_OF = (() => {
  const plain = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  const found = new Map();
  let other = 256;
  for (let byte = 0; byte < 256; byte++) found.set(String.fromCharCode(plain(byte) ? byte : other++), byte);
  return found;
})();
function spelled(token) {
  if (explorer.model.tokens !== "subwords" || /^<.+>$/.test(token)) return token;
  const letters = [...token.replaceAll("▁", " ")];
  if (!letters.every((letter) => BYTE_OF.has(letter))) return letters.join("");
  return new TextDecoder().decode(new Uint8Array(letters.map((letter) => BYTE_OF.get(letter))));
}
// The same where a blank and the end of a line must be seen.
const shown = (token) => (explorer.model.tokens === "subwords" ? spelled(token).replaceAll(" ", "␣").replaceAll("\n", "⏎") : token);

const card = (title, ...content) => el("section", { class: "card" }, el("h2", {}, title), ...content);
const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

const hashOf = (activity, query = {}) => "#" + activity + (Object.keys(query).length ? "?" + new URLSearchParams(query) : "");
const link = (activity, query, text) => el("a", { href: hashOf(activity, query) }, text);
const some = (words) => (words && words.length ? el("small", {}, " " + words.slice(0, 4).map(shown).join(" ")) : null);
const wordName = (entry) => (explorer.has("words") ? link("inside", { kind: "word", of: entry.word }, shown(entry.word)) : shown(entry.word));
const stateName = (entry) => el("span", {}, explorer.knows("states", entry.state) ? link("inside", { kind: "state", of: entry.state }, "state " + entry.state) : "state " + entry.state, some(entry.words));
const blockName = (entry) => el("span", {}, link("inside", { kind: "block", of: entry.block }, "block " + entry.block), some(entry.words));

function field(label, name, value, options = {}) {
  const { size, choices, ...more } = options;
  const input = choices
    ? el("select", { name, ...more }, choices.map(([choice, text]) => el("option", { value: choice, selected: choice === value }, text)))
    : el("input", { name, value: value ?? "", autocomplete: "off", autocapitalize: "none", spellcheck: "false", ...more });
  return el("label", { class: size || null }, label, input);
}
