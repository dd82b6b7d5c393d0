// Requests, routes by the address's fragment, and copies of every view (the sixth activity).
"use strict";

const ACTIVITIES = {
  read: { title: "Read", show: showRead, needs: "score" },
  inside: { title: "Look inside", show: showInside, needs: "states" },
  fill: { title: "Fill gaps", show: showFill, needs: "infill" },
  next: { title: "Next word", show: showNext, needs: "next" },
  map: { title: "Map", show: showMap, needs: "map" },
};

const explorer = {
  data: window.VLHMM_DATA || null, // an exported page's answers
  model: null,
  last: null, // the request behind the view: {method, path, body, answer}
  turn: 0, // answers to older requests are dropped
  aborter: null,

  has(what) {
    if (this.data) return what in this.data;
    return this.model.num_states !== null || what === "score" || what === "next";
  },
  knows(kind, id) { return !this.data || String(id) in (this.data[kind] || {}); },
  firstState() { return this.data ? Object.keys(this.data.states)[0] : "0"; },

  // A sentence of the model's own, so that every example is in its vocabulary.
  async sentence(seed) {
    const body = { prompt: "", max_tokens: 14, n: 8, seed: seed ?? Math.floor(Math.random() * 1e9) };
    const { answer } = await this.ask("POST", "/v1/completions", body);
    const texts = answer.choices.filter((choice) => choice.finish_reason === "stop").map((choice) => choice.text.trim());
    const known = (texts.length ? texts : [answer.choices[0].text.trim()]).sort((a, b) => b.split(" ").length - a.split(" ").length);
    return known.find((text) => !text.includes("<unk>")) ?? known[0];
  },

  headers(body) {
    const headers = body ? { "Content-Type": "application/json" } : {};
    const key = sessionStorage.getItem("key");
    return key ? { ...headers, Authorization: "Bearer " + key } : headers;
  },

  async send(method, path, body, signal) {
    let response;
    try {
      response = await fetch(path, { method, signal, headers: this.headers(body), body: body ? JSON.stringify(body) : undefined });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer; is it still running?");
    }
    if (response.status === 401) {
      const given = window.prompt("This server asks for an API key");
      if (given) { sessionStorage.setItem("key", given); return this.send(method, path, body, signal); }
    }
    if (!response.ok) {
      const { error } = await response.json();
      if (error.code === "not_ready") { // the server looks through the model once; it says how far it is
        document.getElementById("waiting")?.replaceChildren(error.message);
        await new Promise((resolve) => setTimeout(resolve, 500));
        signal?.throwIfAborted();
        return this.send(method, path, body, signal);
      }
      throw Object.assign(new Error(error.message), { param: error.param });
    }
    return response;
  },

  async ask(method, path, body, signal) {
    const answer = this.data ? this.exported(path) : await (await this.send(method, path, body, signal)).json();
    return { method, path, body, answer };
  },

  exported(path) {
    const [, , kind, of] = path.split("?")[0].split("/");
    const id = decodeURIComponent(of || "");
    const found = kind === "map" ? this.data.map : (this.data[kind] || {})[id];
    if (!found) throw new Error(`This page holds ${count(Object.keys(this.data[kind] || {}).length)} ${kind}, the most used ones; ${id || "it"} is not among them.`);
    return found;
  },

  // Ask for a form. An error stands next to the field that caused it; an older answer never replaces a newer one.
  async answer(form, method, path, body, draw) {
    await this.during(form, async (mine, signal) => {
      const found = await this.ask(method, path, body, signal);
      if (mine !== this.turn) return;
      this.last = found;
      draw(found.answer);
    });
  },

  // The same with server-sent events: `draw` gets all that has come so far.
  async stream(form, path, body, draw) {
    await this.during(form, async (mine, signal) => {
      const response = await this.send("POST", path, { ...body, stream: true }, signal);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "", answer = null;
      for (;;) {
        const { value, done } = await reader.read();
        if (done || mine !== this.turn) return;
        buffer += value;
        const events = buffer.split("\n\n");
        buffer = events.pop();
        for (const event of events) {
          const text = event.replace(/^data: /, "");
          if (text === "[DONE]") return;
          const part = JSON.parse(text);
          if (part.error) throw Object.assign(new Error(part.error.message), { param: part.error.param });
          answer = answer ? { ...answer, fills: [...answer.fills, ...part.fills] } : { ...part, wanted: body.n };
          const { wanted, ...plain } = answer;
          this.last = { method: "POST", path, body, answer: plain };
          draw(answer);
        }
      }
    });
  },

  async during(form, work) {
    const mine = ++this.turn;
    this.aborter?.abort();
    this.aborter = new AbortController();
    const told = form.querySelector(".error");
    form.place.setAttribute("aria-busy", "true");
    const soon = setTimeout(() => form.busy.classList.add("on"), 250);
    try {
      await work(mine, this.aborter.signal);
      if (mine !== this.turn) return;
      told.textContent = "";
      for (const input of form.elements) { input.removeAttribute("aria-invalid"); input.removeAttribute("aria-describedby"); }
    } catch (error) {
      if (mine !== this.turn || error.name === "AbortError") return;
      told.textContent = error.message;
      const input = form.elements[error.param] || form.elements.of || form.elements[0];
      const label = input.closest("label");
      if (label) label.after(told); // next to the field
      input.setAttribute("aria-invalid", "true");
      input.setAttribute("aria-describedby", "error");
    } finally {
      clearTimeout(soon);
      if (mine === this.turn) {
        document.getElementById("waiting")?.replaceChildren();
        form.busy.classList.remove("on");
        form.place.setAttribute("aria-busy", "false");
      }
    }
  },

  remember(name, query) { history.replaceState(null, "", hashOf(name, query)); },
};

// ---- copies

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
const python = (value) => JSON.stringify(value, null, 4).replace(/\b(true|false|null)\b(?=[,\n\]}]|$)/g, (word) => ({ true: "True", false: "False", null: "None" })[word]);
const COPIES = {
  link: () => location.href,
  json: ({ answer }) => JSON.stringify(answer, null, 2),
  curl: ({ path, body }) => `curl ${quoted(new URL(path, location.href).href)}` + (body ? ` -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}` : ""),
  python: ({ path, body }) => ["import json", "from urllib.request import Request, urlopen", "",
    ...(body ? [`body = ${python(body)}`] : []),
    `request = Request(${JSON.stringify(new URL(path, location.href).href)}` + (body ? ', json.dumps(body).encode(), {"Content-Type": "application/json"})' : ")"),
    "print(json.load(urlopen(request)))", ""].join("\n"),
};

async function copy(kind) {
  const told = document.getElementById("copied");
  if (!explorer.last && kind !== "link") { told.textContent = "There is no answer yet."; return; }
  const text = COPIES[kind](explorer.last);
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or not a secure context
    const area = el("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  told.textContent = "Copied.";
  setTimeout(() => { told.textContent = ""; }, 2000);
}

// ---- routes

const offered = () => Object.entries(ACTIVITIES).filter(([, entry]) => explorer.has(entry.needs));

async function route() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
  if (name === "main") return; // the skip link
  const [key, entry] = offered().find(([each]) => each === name) || offered()[0];
  explorer.last = null;
  explorer.turn += 1;
  document.getElementById("tabs").replaceChildren(...offered().map(([each, { title }]) =>
    el("li", {}, el("a", { href: hashOf(each), "aria-current": each === key ? "page" : null }, title))));
  document.querySelector("nav [aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = entry.title + " · " + explorer.model.id + " · vlhmm";
  try {
    await entry.show(Object.fromEntries(new URLSearchParams(query || "")));
  } catch (error) { fail(error); }
}

const fail = (error) => document.getElementById("main").replaceChildren(el("p", { class: "error", role: "alert" }, error.message));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const chosen = offered()[Number(event.key) - 1];
  if (chosen) location.hash = hashOf(chosen[0]);
  else if (event.key === "/") { event.preventDefault(); document.querySelector("form input, form select")?.focus(); }
});

async function begin() {
  document.getElementById("main").replaceChildren(el("p", { role: "status" }, "Waiting for the model…"));
  try {
    explorer.model = explorer.data ? explorer.data.model : (await explorer.ask("GET", "/v1/models")).answer.data[0];
  } catch (error) { return fail(error); }
  const { id, num_states: states, num_blocks: blocks, vocab_size: size } = explorer.model;
  document.getElementById("model-name").textContent = id;
  document.getElementById("model-facts").textContent = [states && count(states) + " states", blocks && count(blocks) + " blocks", `${count(size)} ${explorer.model.tokens}`].filter(Boolean).join(" · ");
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = Boolean(explorer.data) && ["curl", "python"].includes(button.dataset.copy);
    button.addEventListener("click", () => copy(button.dataset.copy));
  }
  addEventListener("hashchange", route);
  route();
}
begin();
