// The explorer: five views behind the address's fragment, and a way to copy each of them (the sixth activity).
import { bars, blockLink, el, field, link, percent, stateLink, wordLink } from "./views.js";

const main = document.getElementById("main");
const exported = document.documentElement.dataset.export;
let data = null; // an exported page's answers
let last = null; // the request behind the view: {method, path, body, answer}
let turn = 0; // answers of older requests are dropped

const VIEWS = {
  read: { title: "Read", show: showRead, server: true },
  inside: { title: "Look inside", show: showInside },
  fill: { title: "Fill gaps", show: showFill, server: true },
  next: { title: "Next word", show: showNext, server: true },
  map: { title: "Map", show: showMap },
};
const views = Object.entries(VIEWS).filter(([, view]) => !exported || !view.server);

async function ask(method, path, body) {
  if (data) return { method, path, body, answer: exportedAnswer(path) };
  const headers = body ? { "Content-Type": "application/json" } : {};
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = "Bearer " + key;
  let response;
  try {
    response = await fetch(path, { method, headers, body: body ? JSON.stringify(body) : undefined });
  } catch {
    throw new Error("the server does not answer; is it still running?");
  }
  if (response.status === 401) {
    const given = window.prompt("This server asks for an API key");
    if (given) { sessionStorage.setItem("key", given); return ask(method, path, body); }
  }
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error.message), { param: answer.error.param });
  return { method, path, body, answer };
}

function exportedAnswer(path) {
  const [, , kind, of] = path.split("?")[0].split("/");
  const found = kind === "summary" || kind === "map" ? data[kind] : (data[kind] || {})[decodeURIComponent(of || "")];
  if (!found) throw new Error(`this page holds the most used ${kind} only, and ${decodeURIComponent(of || "")} is not among them`);
  return found;
}

// Run a request for a form; its error goes beside the field to blame.
async function answerTo(form, method, path, body, draw) {
  const mine = ++turn;
  const said = form.querySelector(".error");
  said.textContent = "";
  for (const input of form.elements) input.removeAttribute("aria-invalid");
  try {
    const found = await ask(method, path, body);
    if (mine !== turn) return;
    last = found;
    draw(found.answer);
  } catch (error) {
    if (mine !== turn) return;
    said.textContent = error.message;
    const input = form.elements[error.param] || form.elements[0];
    if (input) { input.setAttribute("aria-invalid", "true"); input.setAttribute("aria-describedby", "error"); }
  }
}

const errorLine = () => el("p", { class: "error", id: "error", role: "alert" });
const remember = (view, query) => history.replaceState(null, "", "#" + view + "?" + new URLSearchParams(query));

function makeForm(fields, onAsk, live = false) {
  let waiting = 0;
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); onAsk(form); } }, fields, live ? null : el("button", { type: "submit" }, "Ask"), errorLine());
  if (live) form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => onAsk(form), 60); });
  return form;
}
const values = (form) => Object.fromEntries(new FormData(form));

// 1. A sentence: surprisal, both-sided alternatives, states.
function showRead(query) {
  const place = el("div");
  const form = makeForm([field("A sentence", "text", query.text || "the company said it expects to report a loss", { maxlength: 2000 })], run);
  main.replaceChildren(el("h2", {}, "Read a sentence"), form, place);
  function run() {
    const { text } = values(form);
    remember("read", { text });
    answerTo(form, "POST", "/v1/posteriors", { text, top_k: 6, num_states: 8 }, (answer) => place.replaceChildren(...drawRead(answer)));
  }
  run();
}

function drawRead(answer) {
  const details = el("div", { "aria-live": "polite" });
  const show = (entry, number) => details.replaceChildren(
    bars(`In place ${number + 1}, given everything else (“${entry.word}”: ${entry.log_prob_given_rest === null ? "impossible" : percent(Math.exp(entry.log_prob_given_rest))})`, entry.expected, wordLink));
  const words = el("div", { class: "words" }, answer.places.map((entry, number) => {
    const bits = entry.log_prob === null ? Infinity : -entry.log_prob / Math.LN2;
    return el("button", {
      type: "button", class: "word", css: { background: `rgba(var(--warm), ${Math.min(0.45, bits / 36)})` },
      onmouseenter: () => show(entry, number), onfocus: () => show(entry, number), onclick: () => show(entry, number),
      "aria-label": `${entry.word}, surprisal ${bits.toFixed(1)} bits`,
    }, entry.word, el("small", {}, bits.toFixed(1) + (entry.oov ? " oov" : "")));
  }));
  const rank = Math.max(...answer.places.map((entry) => entry.states.length));
  const rows = answer.places.map((entry) => el("tr", {}, el("th", { scope: "row" }, entry.word),
    Array.from({ length: rank }, (_, i) => {
      const state = entry.states[i];
      if (!state) return el("td");
      const path = state.state === entry.path_state;
      return el("td", { class: path ? "path" : null, css: { background: `rgba(var(--heat), ${(0.55 * state.smoothed).toFixed(3)})` }, title: `before the rest is read: ${percent(state.filtered)}` },
        link("inside", { kind: "state", of: state.state }, String(state.state)), ` ${(100 * state.smoothed).toFixed(0)}%`, path ? " ◂" : "");
    })));
  show(answer.places[0], 0);
  return [
    el("p", { class: "muted" }, `log p = ${answer.log_prob === null ? "−∞" : answer.log_prob.toFixed(3)} nats. Under each word: surprisal in bits, left to right.`),
    words, details,
    el("h3", {}, "States behind each word"),
    el("p", { class: "muted" }, "The most probable states given the whole sentence; ◂ marks the single best path."),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "State posteriors" }, el("table", { class: "heat" }, el("tbody", {}, rows))),
  ];
}

// 2. A state, a word, a block.
function showInside(query) {
  const kinds = data ? ["state", "block"] : ["word", "state", "block"];
  const kind = kinds.includes(query.kind) ? query.kind : data ? "block" : "word";
  const place = el("div");
  const form = makeForm([
    field("What", "kind", kind, { choices: kinds, small: true }), field("Which", "of", query.of ?? (kind === "word" ? "the" : "0")),
  ], run);
  main.replaceChildren(el("h2", {}, "Look inside"), form, place);
  function run() {
    const wish = values(form);
    remember("inside", wish);
    answerTo(form, "GET", `/v1/${wish.kind}s/${encodeURIComponent(wish.of.trim())}`, null, (answer) => place.replaceChildren(...drawInside(wish.kind, answer)));
  }
  run();
}

function drawInside(kind, v) {
  const facts = kind === "word"
    ? `${v.word}: ${percent(v.frequency)} of tokens (rank ${v.frequency_rank}), ${v.num_states} states may emit it`
    : `${kind} ${v[kind]}: ${percent(v.usage)} of tokens (rank ${v.usage_rank}), ${v.num_words} words`;
  const parts = kind === "word"
    ? [bars("States it comes from", v.states.map((s) => ({ ...s, probability: s.share })), stateLink), bars("Words before", v.previous_words, wordLink), bars("Words after", v.next_words, wordLink)]
    : [bars("Words", v.words, wordLink), kind === "block" ? bars("Its states", v.states, stateLink) : null,
      bars("Words before", v.previous_words, wordLink), bars("Words after", v.next_words, wordLink),
      bars("States before", v.previous_states, stateLink), bars("States after", v.next_states, stateLink),
      bars("Blocks before", v.previous_blocks, blockLink), bars("Blocks after", v.next_blocks, blockLink)];
  const examples = v.examples && v.examples.length
    ? el("section", {}, el("h3", {}, "Sentences drawn from the model that visit it"), el("ul", {}, v.examples.map((example) => el("li", {},
      example.words.flatMap((word, i) => [i === example.place ? el("mark", {}, word) : word, " "])))))
    : null;
  return [el("p", {}, facts, v.block !== undefined && v.block !== null && kind !== "block" ? el("span", {}, ", ", link("inside", { kind: "block", of: v.block }, "block " + v.block)) : null),
    el("div", { class: "columns" }, parts), examples].filter(Boolean);
}

// 3. A template with gaps; fills come in a few at a time.
function showFill(query) {
  const place = el("div");
  const form = makeForm([
    field("Template", "template", query.template || "the [MASK:1-3] of the company"),
    field("Must contain (comma between)", "must_contain", query.must_contain), field("Must not", "must_not", query.must_not),
    field("Regular expression over words", "regex", query.regex),
    field("Mode", "mode", query.mode || "sample", { choices: ["sample", "best", "marginals"], small: true }),
  ], run);
  main.replaceChildren(el("h2", {}, "Fill gaps"), el("p", { class: "muted" }, "[MASK] is one word, [MASK:1-3] one to three. Fills are drawn given both sides."), form, place);
  function run() {
    const wish = values(form);
    remember("fill", wish);
    const split = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);
    const body = { template: wish.template, mode: wish.mode, n: 4, seed: 0, top_k: 8 };
    for (const name of ["must_contain", "must_not"]) if (split(wish[name]).length) body[name] = split(wish[name]);
    if (wish.regex.trim()) body.regex = wish.regex.trim();
    const seen = new Map();
    const draw = (answer) => {
      place.replaceChildren(...drawFill(answer, seen));
      const mine = turn;
      if (wish.mode === "sample" && body.seed < 5) setTimeout(() => { if (mine === turn) { body.seed += 1; answerTo(form, "POST", "/v1/infill", { ...body }, draw); } }, 50);
    };
    answerTo(form, "POST", "/v1/infill", { ...body }, draw);
  }
  run();
}

function drawFill(answer, seen) {
  const about = answer.constraint_probability === null ? "No constraint."
    : `The constraint holds with probability ${percent(answer.constraint_probability)}, given the words of the template.`;
  if (answer.gaps) {
    return [el("p", {}, about), el("div", { class: "columns" }, answer.gaps.flatMap((gap, g) => gap.lengths.flatMap((entry) => entry.places.map((words, i) =>
      bars(`Gap ${g + 1}, word ${i + 1} of ${entry.length} (${percent(entry.probability)})`, words, wordLink)))))];
  }
  for (const fill of answer.fills) seen.set(fill.text, fill);
  const fills = [...seen.values()].sort((a, b) => b.probability - a.probability);
  return [el("p", { id: "constraint" }, about, answer.criterion ? ` Best by: ${answer.criterion}.` : ""), bars("Fills", fills, (fill) => fill.text)];
}

// 4. The next word, with every key.
function showNext(query) {
  const place = el("div");
  const form = makeForm([field("What was read so far", "context", query.context ?? "the president of", { maxlength: 2000 })], run, true);
  main.replaceChildren(el("h2", {}, "Next word"), form, place);
  function run() {
    const { context } = values(form);
    remember("next", { context });
    answerTo(form, "POST", "/v1/next", { context, top_k: 25 }, (answer) => place.replaceChildren(
      el("p", { class: "muted" }, `Entropy ${(answer.entropy / Math.LN2).toFixed(2)} bits; as uncertain as ${Math.exp(answer.entropy).toFixed(0)} equally likely words.`),
      bars("Most probable", answer.words, wordLink)));
  }
  run();
}

// 5. The map of blocks.
function showMap(query) {
  const place = el("div");
  const form = makeForm([field("Pixels per block", "zoom", query.zoom || "", { type: "number", min: 1, max: 60, small: true })], run, true);
  main.replaceChildren(el("h2", {}, "Map of blocks"), el("p", { class: "muted" }, "Row: a block. Column: the block of the next word. Neighbours are near in the tree of the clustering."), form, place);
  function run() {
    const zoom = Number(values(form).zoom);
    remember("map", zoom ? { zoom } : {});
    answerTo(form, "GET", "/v1/map", null, (answer) => place.replaceChildren(...drawMap(answer, zoom)));
  }
  run();
}

function drawMap({ blocks, matrix }, zoom) {
  if (!blocks.length) return [el("p", {}, "This model has no blocks: every word has its own set of states.")];
  const size = Math.min(60, zoom || Math.max(3, Math.floor(Math.min(720, innerWidth - 60) / blocks.length)));
  const canvas = el("canvas", { width: size * blocks.length, height: size * blocks.length, role: "img", "aria-label": "Block-by-block transition matrix; the table below holds the same blocks" });
  const paint = canvas.getContext("2d");
  const heat = getComputedStyle(document.documentElement).getPropertyValue("--heat");
  matrix.forEach((row, from) => row.forEach((p, to) => { paint.fillStyle = `rgba(${heat}, ${Math.min(1, Math.sqrt(p) * 1.4)})`; paint.fillRect(to * size, from * size, size, size); }));
  const said = el("p", { role: "status" }, "Point at a cell, or use the table.");
  const cell = (event) => [event.offsetY, event.offsetX].map((at) => Math.min(blocks.length - 1, Math.max(0, Math.floor(at / size))));
  canvas.addEventListener("mousemove", (event) => {
    const [from, to] = cell(event);
    said.textContent = `block ${from} (${blocks[from].words.join(" ")}) to block ${to} (${blocks[to].words.join(" ")}): ${percent(matrix[from][to])}`;
  });
  canvas.addEventListener("click", (event) => { location.hash = "inside?kind=block&of=" + cell(event)[0]; });
  return [said, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Map of blocks" }, canvas),
    bars("Blocks by their share of tokens", blocks.map((block) => ({ ...block, probability: block.usage })).sort((a, b) => b.probability - a.probability), blockLink)];
}

// 6. Copies of a view: link, answer, curl, Python.
const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
const COPIES = {
  link: () => location.href,
  json: () => JSON.stringify(last.answer, null, 2),
  curl: () => `curl ${quoted(new URL(last.path, location.href).href)}` + (last.body ? ` -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(last.body))}` : ""),
  python: () => `import json, urllib.request\n\nrequest = urllib.request.Request(${JSON.stringify(new URL(last.path, location.href).href)}` +
    (last.body ? `,\n    data=json.dumps(json.loads(${JSON.stringify(JSON.stringify(last.body))})).encode(),\n    headers={"Content-Type": "application/json"}` : "") + `)\nprint(json.load(urllib.request.urlopen(request)))`,
};
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const said = document.getElementById("copied");
    if (!last && button.dataset.copy !== "link") { said.textContent = "Nothing has been answered yet."; return; }
    try {
      await navigator.clipboard.writeText(COPIES[button.dataset.copy]());
      said.textContent = "Copied.";
    } catch { said.textContent = "The browser does not allow copying here."; }
  });
}

function route() {
  const [name, query] = location.hash.slice(1).split("?");
  const chosen = views.find(([key]) => key === name) || views[0];
  last = null;
  turn += 1;
  document.getElementById("tabs").replaceChildren(...views.map(([key, view]) =>
    el("li", {}, el("a", { href: "#" + key, "aria-current": key === chosen[0] ? "page" : null }, view.title))));
  document.title = chosen[1].title + " · vlhmm explorer";
  chosen[1].show(Object.fromEntries(new URLSearchParams(query || "")));
}

async function begin() {
  main.replaceChildren(el("p", { role: "status" }, "Loading the model…"));
  try {
    if (exported) data = await (await fetch(exported)).json();
    document.getElementById("model-name").textContent = data ? data.model : (await ask("GET", "/v1/models")).answer.data[0].id;
  } catch (error) { main.replaceChildren(el("p", { class: "error", role: "alert" }, error.message)); return; }
  addEventListener("hashchange", route);
  route();
}
begin();
