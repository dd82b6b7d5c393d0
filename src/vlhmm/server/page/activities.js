// What a person does here: read, look inside, fill gaps, watch the next word, see the map.
"use strict";

const values = (form) => Object.fromEntries(new FormData(form));

// A heading, a form and a place for the answer. `onAsk(form, place)` is called on submit, or on every key if `live`.
function activity(title, lead, fields, onAsk, { live = false, extra = null } = {}) {
  const place = el("div", { class: "answer", "aria-busy": "true" });
  const busy = el("progress", { class: "busy", "aria-label": "The model is computing" });
  let waiting = 0;
  const form = el("form", { novalidate: true },
    el("div", { class: "fields" }, fields, live ? null : el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Ask"), extra)),
    el("p", { class: "error", id: "error", role: "alert" }));
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(waiting); onAsk(form, place); });
  if (live) form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => onAsk(form, place), 40); });
  document.getElementById("main").replaceChildren(el("h1", {}, title), el("p", { class: "lead" }, lead), form, busy, el("p", { id: "waiting", class: "muted", role: "status" }), place);
  Object.assign(form, { busy, place });
  return { form, place };
}

// ---- 1. A sentence: surprisal, what both sides expect, the states behind it

async function showRead(query) {
  const text = query.text ?? (await explorer.sentence(1));
  const draw = el("button", { type: "button", onclick: async () => { form.elements.text.value = await explorer.sentence(); ask(); } }, "Draw a sentence");
  const { form, place } = activity("Read a sentence",
    "Each word is shaded by its surprisal: how unexpected it is after the words before it. Choose a word to see what both of its sides expect in its place.",
    [field("Sentence", "text", text, { size: "grow", class: "big" })], ask, { extra: draw });
  function ask() {
    const wish = values(form);
    explorer.remember("read", wish);
    if (explorer.has("states")) explorer.answer(form, "POST", "/v1/posteriors", { text: wish.text, top_k: 8, num_states: 6 }, (answer) => place.replaceChildren(...drawReading(answer)));
    else explorer.answer(form, "POST", "/v1/score", { text: wish.text }, (answer) => place.replaceChildren(drawSentence(answer.tokens.map((t) => ({ ...t, oov: false })), answer, () => {})));
  }
  ask();
}

const bitsOf = (logProb) => (logProb === null ? Infinity : -logProb / Math.LN2);

function drawSentence(places, answer, choose) {
  const words = places.map((place, t) => {
    const bits = bitsOf(place.log_prob);
    return el("button", {
      type: "button", class: "word", css: { background: `rgba(var(--warm), ${Math.min(0.5, bits / 30).toFixed(3)})` },
      "aria-pressed": "false", "aria-label": `${shown(place.word)}: ${bits.toFixed(1)} bits${place.oov ? ", not in the vocabulary" : ""}`,
      onmouseenter: () => choose(t), onfocus: () => choose(t), onclick: () => choose(t),
    }, shown(place.word), el("small", {}, place.oov ? "unknown" : bits.toFixed(1)));
  });
  const total = answer.log_prob === null ? "−∞" : answer.log_prob.toFixed(3);
  return el("section", { class: "card" }, el("h2", {}, "Surprisal in bits"), el("div", { class: "sentence" }, words),
    el("p", { class: "muted" }, el("span", { class: "scale", "aria-hidden": "true" }), ` 0 to 15 bits and more. log p = ${total} nats, the end of the sentence included.`));
}

function drawReading(answer) {
  const details = el("div", { "aria-live": "polite" });
  let sentence;
  const choose = (t) => {
    const place = answer.places[t];
    [...sentence.querySelectorAll(".word")].forEach((node, i) => node.setAttribute("aria-pressed", String(i === t)));
    details.replaceChildren(card(`Word ${t + 1}, “${shown(place.word)}”: what the rest of the sentence expects`,
      el("p", { class: "muted" }, `“${shown(place.word)}” itself has probability ${place.log_prob_given_rest === null ? "0" : percent(Math.exp(place.log_prob_given_rest))} given both sides, ${percent(Math.exp(place.log_prob ?? -Infinity))} given the left side alone.`),
      bars(place.expected, wordName)));
  };
  sentence = drawSentence(answer.places, answer, choose);
  choose(answer.places.reduce((worst, place, t) => (bitsOf(place.log_prob) > bitsOf(answer.places[worst].log_prob) ? t : worst), 0));
  return [sentence, el("div", { class: "aside" }, details, drawStates(answer))];
}

// The posterior over states as a heat map: a column per word, its states by rank; the best path is a line through it.
function drawStates(answer) {
  const columns = answer.places.map((place) => {
    const states = [...place.states];
    if (!states.some((s) => s.state === place.path_state)) states.push({ state: place.path_state, smoothed: place.path_posterior, filtered: null });
    return states;
  });
  const rows = Math.max(...columns.map((states) => states.length));
  const best = [];
  const cells = columns.flatMap((states, t) => {
    const place = answer.places[t];
    const column = [el("div", { class: "head" }, shown(place.word))];
    for (let i = 0; i < rows; i++) {
      const s = states[i];
      if (!s) { column.push(el("div", { class: "cell empty" })); continue; }
      const onPath = s.state === place.path_state;
      const node = el("a", {
        class: onPath ? "cell best" : "cell", href: hashOf("inside", { kind: "state", of: s.state }), css: { background: `rgba(var(--heat), ${(0.06 + 0.44 * s.smoothed).toFixed(3)})` },
        title: s.filtered === null ? null : `${percent(s.filtered)} before the rest is read`,
        "aria-label": `${shown(place.word)}: state ${s.state}, ${percent(s.smoothed)}${onPath ? ", on the best path" : ""}`,
      }, `${s.state} · ${(100 * s.smoothed).toFixed(0)}%`);
      if (onPath) best.push(node);
      column.push(node);
    }
    return column;
  });
  const grid = el("div", { class: "heat", css: { "grid-template-rows": `repeat(${rows + 1}, auto)`, "grid-auto-flow": "column" } }, cells);
  requestAnimationFrame(() => {
    if (!grid.isConnected) return;
    const points = best.map((node) => [node.offsetLeft + node.offsetWidth / 2, node.offsetTop + node.offsetHeight / 2]);
    const overlay = svg("svg", { width: grid.scrollWidth, height: grid.scrollHeight, "aria-hidden": "true" });
    for (let i = 1; i < points.length; i++) { // between the cells, so that no number is crossed out
      const [a, b] = [best[i - 1], best[i]];
      overlay.append(svg("polyline", { points: `${a.offsetLeft + a.offsetWidth},${points[i - 1][1]} ${b.offsetLeft},${points[i][1]}` }));
    }
    grid.append(overlay);
  });
  return card("Hidden states",
    el("p", { class: "muted" }, `The most probable states of each word given the whole sentence. The line is the single best path, log p = ${answer.path_log_prob.toFixed(2)} nats. Choose a state to look inside.`),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "State posteriors and the best path" }, grid));
}

// ---- 2. A state, a word, a block

async function showInside(query) {
  const kinds = [["block", "Block"], ["state", "State"], ["word", "Word"]].filter(([kind]) => explorer.has(kind + "s"));
  const kind = kinds.some(([k]) => k === query.kind) ? query.kind : kinds[0][0];
  const first = { block: "0", state: explorer.firstState(), word: "the" };
  const { form, place } = activity("Look inside",
    "What a state, a block of words or a word stands for: what it emits, where it comes from, where it leads, how often it is used.",
    [field("What", "kind", kind, { choices: kinds, size: "small" }), field("Number or word", "of", query.of ?? first[kind])], ask);
  form.elements.kind.addEventListener("change", () => { form.elements.of.value = first[form.elements.kind.value]; ask(); });
  function ask() {
    const wish = values(form);
    explorer.remember("inside", wish);
    explorer.answer(form, "GET", `/v1/${wish.kind}s/${encodeURIComponent(wish.of.trim())}`, null,
      (answer) => place.replaceChildren(...(wish.kind === "word" ? drawWord(answer) : drawStateOrBlock(wish.kind, answer))));
  }
  ask();
}

function drawStateOrBlock(kind, view) {
  const isState = kind === "state";
  return [
    facts([
      [isState ? "State" : "Block", String(view[kind])], ["Share of tokens", percent(view.usage)], ["Rank by use", count(view.usage_rank)], ["Words", count(view.num_words)],
      isState && view.block !== null && view.block !== undefined ? ["In", link("inside", { kind: "block", of: view.block }, "block " + view.block)] : null,
    ]),
    el("div", { class: "columns" },
      card("Emits", bars(view.words, wordName)),
      isState ? null : card("Its states", bars(view.states, stateName)),
      card("Words before", bars(view.previous_words, wordName)), card("Words after", bars(view.next_words, wordName)),
      card("States before", bars(view.previous_states, stateName)), card("States after", bars(view.next_states, stateName)),
      card("Blocks before", bars(view.previous_blocks, blockName)), card("Blocks after", bars(view.next_blocks, blockName))),
    drawExamples(view.examples),
  ].filter(Boolean);
}

function drawExamples(examples) {
  if (!examples || !examples.length) return null;
  return card("Sentences the model wrote here", el("ul", { class: "examples" }, examples.map((example) => el("li", {},
    example.words.flatMap((word, i) => [example.places.includes(i) ? el("mark", {}, spelled(word)) : spelled(word), explorer.model.tokens === "subwords" ? "" : " "])))));
}

function drawWord(view) {
  return [
    facts([["Word", shown(view.word)], ["Share of tokens", percent(view.frequency)], ["Rank", count(view.frequency_rank)], ["States that emit it", count(view.num_states)],
      view.block !== null && view.block !== undefined ? ["In", link("inside", { kind: "block", of: view.block }, "block " + view.block)] : null]),
    el("div", { class: "columns" },
      card("States it comes from", bars(view.states.map((s) => ({ ...s, probability: s.share })), stateName)),
      card("Words before", bars(view.previous_words, wordName)), card("Words after", bars(view.next_words, wordName))),
    drawExamples(view.examples),
  ].filter(Boolean);
}

// ---- 3. A template with gaps

async function showFill(query) {
  const words = query.template === undefined ? (await explorer.sentence(3)).split(" ") : [];
  const template = query.template ?? [...words.slice(0, 2), "[MASK:1-3]", ...words.slice(4)].join(" ");
  const limits = el("details", { class: "more", open: Boolean(query.must_contain || query.must_not || query.regex) }, el("summary", {}, "Constraints on the text"),
    el("div", { class: "fields" }, field("Must contain (a comma between phrases)", "must_contain", query.must_contain), field("Must not contain", "must_not", query.must_not), field("Regular expression over words", "regex", query.regex)));
  const { form, place } = activity("Fill gaps", "[MASK] is one word, [MASK:1-3] one to three. The words are drawn given everything around them, exactly.",
    [field("Template", "template", template, { size: "grow", class: "big" }),
      field("Answer", "mode", query.mode || "sample", { choices: [["sample", "draws"], ["best", "the best fill"], ["marginals", "words by place"]], size: "small" })], ask);
  form.querySelector(".fields").after(limits);
  function ask() {
    const wish = values(form);
    explorer.remember("fill", Object.fromEntries(Object.entries(wish).filter(([, value]) => value)));
    const body = { template: wish.template, mode: wish.mode, n: 24, seed: 1, top_k: 8 };
    for (const name of ["must_contain", "must_not"]) {
      const phrases = wish[name].split(",").map((part) => part.trim()).filter(Boolean);
      if (phrases.length) body[name] = phrases;
    }
    if (wish.regex.trim()) body.regex = wish.regex.trim();
    if (wish.mode !== "sample") return void explorer.answer(form, "POST", "/v1/infill", body, (answer) => place.replaceChildren(...drawFills(answer)));
    explorer.stream(form, "/v1/infill", body, (answer) => place.replaceChildren(...drawFills(answer)));
  }
  ask();
}

function drawFills(answer) {
  const p = answer.constraint_probability;
  const told = [p === null || p === undefined ? null : el("p", { id: "constraint" }, "The constraint holds with probability ", el("b", {}, percent(p)), ", given the words of the template.")];
  if (answer.gaps) {
    return [...told, el("div", { class: "columns" }, answer.gaps.flatMap((gap, g) => gap.lengths.flatMap((entry) => entry.places.map((words, i) =>
      card(`Gap ${g + 1}, word ${i + 1} of ${entry.length}`, el("p", { class: "muted" }, `This length has probability ${percent(entry.probability)}.`), bars(words, wordName))))))].filter(Boolean);
  }
  const seen = new Map();
  for (const fill of answer.fills) seen.set(fill.text, fill);
  const fills = [...seen.values()].sort((a, b) => b.probability - a.probability);
  const title = answer.criterion ? `The best fill (${answer.criterion})` : `${answer.fills.length} of ${answer.wanted ?? answer.fills.length} draws, ${fills.length} different`;
  return [...told, card(title, bars(fills, (fill) => filledText(answer.template, fill), true))].filter(Boolean);
}

// The text of a fill with what stands in the gaps marked.
function filledText(template, fill) {
  const parts = template.split(/(\[MASK[^\]]*\])/);
  let gap = 0;
  return el("span", {}, parts.map((part, i) => (i % 2 ? el("mark", {}, fill.gaps[gap++] || "–") : part)));
}

// ---- 4. The next word, with every key

async function showNext(query) {
  const context = query.context ?? (await explorer.sentence(1)).split(" ").slice(0, 3).join(" ") + " ";
  const { form, place } = activity("Next word", "The exact distribution of the next word, with every key.",
    [field("Words so far", "context", context, { size: "grow", class: "big" })], ask, { live: true });
  function ask() {
    const wish = values(form);
    explorer.remember("next", wish);
    explorer.answer(form, "POST", "/v1/next", { context: wish.context, top_k: 20 }, (answer) => {
      const rest = Math.max(0, 1 - answer.words.reduce((sum, w) => sum + w.probability, 0));
      place.replaceChildren(
        facts([["Entropy", (answer.entropy / Math.LN2).toFixed(2) + " bits"], ["As uncertain as", count(Math.exp(answer.entropy).toFixed(answer.entropy < 2.3 ? 1 : 0)) + " equal words"], ["All other words", percent(rest)], answer.oov ? ["Unknown words", count(answer.oov)] : null]),
        card("Most probable next words", bars(answer.words, (w) => (w.word === answer.eos ? el("span", {}, "end of the sentence") : continued(form, w)), true)));
    });
  }
  ask();
}

function continued(form, entry) {
  const before = form.elements.context.value;
  const context = explorer.model.tokens === "subwords" ? before + spelled(entry.word) : (before.trimEnd() + " " + entry.word).trimStart() + " ";
  return el("a", { href: hashOf("next", { context }) }, shown(entry.word));
}

// ---- 5. The map of blocks

async function showMap(query) {
  const { form, place } = activity("Map of blocks", "How blocks of words follow each other. Row: a block. Column: the block of the next word. Blocks lie in the order of Brown's tree, so neighbours are alike.",
    [field("Zoom", "zoom", query.zoom || "1", { type: "range", min: 1, max: 8, step: 0.5, size: "small" })], ask, { live: true });
  const kept = { at: null }; // the chosen cell
  let known = null; // the answer: zooming asks nothing
  function draw(answer) {
    const typing = document.activeElement?.tagName === "CANVAS";
    known = answer;
    place.replaceChildren(...drawMap(answer, Number(values(form).zoom) || 1, form, kept));
    if (typing) place.querySelector("canvas").focus();
  }
  function ask() {
    const zoom = Number(values(form).zoom) || 1;
    explorer.remember("map", zoom === 1 ? {} : { zoom });
    if (known) draw(known);
    else explorer.answer(form, "GET", "/v1/map", null, draw);
  }
  ask();
}

function drawMap({ blocks, matrix }, zoom, form, kept) {
  if (!blocks.length) return [el("p", {}, "This model has no blocks: every word has its own set of states.")];
  const room = Math.min(document.getElementById("main").clientWidth - 34, 720);
  const size = Math.max(1, (room / blocks.length) * zoom);
  const side = Math.round(size * blocks.length);
  const ratio = Math.min(devicePixelRatio || 1, 4096 / side);
  const canvas = el("canvas", { width: Math.round(side * ratio), height: Math.round(side * ratio), css: { width: side + "px", height: side + "px" }, tabindex: 0, role: "application",
    "aria-label": "Block-by-block transition matrix. Arrow keys move the cell, Enter opens its block, plus and minus zoom." });
  const paint = canvas.getContext("2d");
  const heat = getComputedStyle(document.documentElement).getPropertyValue("--heat");
  const warm = getComputedStyle(document.documentElement).getPropertyValue("--warm");
  const scaled = size * ratio;
  const at = [0, 0];
  const image = new ImageData(blocks.length, blocks.length);
  const colour = heat.split(",").map(Number);
  matrix.forEach((row, from) => row.forEach((p, to) => image.data.set([...colour, Math.round(255 * Math.min(1, 1.7 * p ** 0.4))], 4 * (from * blocks.length + to))));
  const small = el("canvas", { width: blocks.length, height: blocks.length });
  small.getContext("2d").putImageData(image, 0, 0);
  function draw() {
    paint.clearRect(0, 0, canvas.width, canvas.height);
    paint.imageSmoothingEnabled = scaled < 1;
    paint.drawImage(small, 0, 0, canvas.width, canvas.height);
    paint.strokeStyle = `rgb(${warm})`;
    paint.lineWidth = 2;
    paint.strokeRect(at[1] * scaled - 1, at[0] * scaled - 1, scaled + 2, scaled + 2);
  }
  const told = el("p", { class: "told", role: "status" });
  function choose(from, to) {
    at[0] = Math.min(blocks.length - 1, Math.max(0, from));
    at[1] = Math.min(blocks.length - 1, Math.max(0, to));
    const name = (i) => el("span", {}, link("inside", { kind: "block", of: blocks[i].block }, "block " + blocks[i].block), ` (${blocks[i].words.slice(0, 3).map(shown).join(" ")})`);
    told.replaceChildren(name(at[0]), " → ", name(at[1]), ": ", el("b", {}, percent(matrix[at[0]][at[1]])));
    kept.at = at;
    draw();
  }
  const cell = (event) => [Math.floor(event.offsetY / size), Math.floor(event.offsetX / size)];
  canvas.addEventListener("mousemove", (event) => choose(...cell(event)));
  canvas.addEventListener("click", (event) => { choose(...cell(event)); location.hash = hashOf("inside", { kind: "block", of: blocks[at[0]].block }); });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (moves[event.key]) choose(at[0] + moves[event.key][0], at[1] + moves[event.key][1]);
    else if (event.key === "Enter") location.hash = hashOf("inside", { kind: "block", of: blocks[at[0]].block });
    else if ("+-=".includes(event.key)) { form.elements.zoom.value = zoom + (event.key === "-" ? -1 : 1); form.requestSubmit(); }
    else return;
    event.preventDefault();
    canvas.parentElement.scrollTo({ left: at[1] * size - canvas.parentElement.clientWidth / 2, top: at[0] * size - canvas.parentElement.clientHeight / 2 });
  });
  const best = matrix.flatMap((row, from) => row.map((p, to) => ({ from, to, p, weight: p * blocks[from].usage })))
    .sort((a, b) => b.weight - a.weight).slice(0, 12).map(({ from, to, weight }) => ({ from, to, probability: weight }));
  choose(...(kept.at || [best[0].from, best[0].to]));
  return [told, el("div", { class: "mapped" }, el("div", { class: "map" }, canvas), el("div", { class: "beside" },
    card("Largest blocks", bars(blocks.map((b) => ({ ...b, probability: b.usage })).sort((a, b) => b.probability - a.probability).slice(0, 12), blockName)),
    card("Most frequent steps", bars(best, ({ from, to }) => el("span", {}, link("inside", { kind: "block", of: blocks[from].block }, shown(blocks[from].words[0] || "block " + blocks[from].block)), " → ", link("inside", { kind: "block", of: blocks[to].block }, shown(blocks[to].words[0] || "block " + blocks[to].block)))))))];
}
