"use strict";
const byId = id => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const models = { list: [] };
const history = [];

// ---- requests -------------------------------------------------------------------------------------------------------

function headers() {
  const key = byId("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function post(path, body) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const found = JSON.parse(text);
    return `${response.status}: ${found.error?.message ?? found.error ?? found.message ?? text}`;
  } catch { return `${response.status}: ${text}`; }
}

const lines = text => text.split("\n").map(line => line.trim()).filter(Boolean);
const able = tool => models.list.filter(({ abilities }) =>
  abilities.includes(tool.ability) && !(tool.unless ?? []).some(name => abilities.includes(name)));

// ---- what is shown --------------------------------------------------------------------------------------------------

function rank(rows) {
  const top = Math.max(...rows.map(row => Math.abs(row.score)), 1e-9);
  return rows.map(({ text, score }) => {
    const inner = make("i");
    inner.style.width = `${Math.max(0, 100 * score / top)}%`;
    return make("div", { className: "rank" }, make("span", {}, text), make("b", {}, score.toFixed(4)),
      make("div", { className: "bar" }, inner));
  });
}

function marked(text, entities) {
  const shown = make("p");
  const letters = Array.from(text);  // offsets count characters, not UTF-16 units
  let place = 0;
  for (const each of entities) {
    shown.append(letters.slice(place, each.start).join(""));
    shown.append(make("mark", { title: each.score.toFixed(3) }, letters.slice(each.start, each.end).join(""),
      make("sub", {}, each.entity_group)));
    place = each.end;
  }
  shown.append(letters.slice(place).join(""));
  return shown;
}

const TOOLS = {
  similarity: {
    title: "Similarity", ability: "embed",
    fields: [["one", "Text", "A man is eating food."], ["other", "Another text", "Someone has lunch."]],
    run: async ({ one, other }, model) => {
      const body = { inputs: { source_sentence: one, sentences: [other] }, model: model.name };
      const [cosine] = await (await post("/similarity", body)).json();
      return [make("div", { className: "big" }, cosine.toFixed(4)), make("p", { className: "soft" }, "cosine")];
    },
  },
  search: {
    title: "Search", ability: "embed",
    fields: [["query", "Query", "How do plants get energy?"],
      ["documents", "Documents, one on each line",
        "Photosynthesis turns light into sugar.\nThe train leaves at noon.\nRoots take up water and minerals.", true]],
    run: async ({ query, documents }, model) => {
      const texts = lines(documents);
      const body = { inputs: { source_sentence: query, sentences: texts }, model: model.name };
      const scores = await (await post("/similarity", body)).json();
      return rank(texts.map((text, index) => ({ text, score: scores[index] })).sort((a, b) => b.score - a.score));
    },
  },
  rerank: {
    title: "Rerank", ability: "rerank",
    fields: [["query", "Query", "How do plants get energy?"],
      ["documents", "Documents, one on each line",
        "Photosynthesis turns light into sugar.\nThe train leaves at noon.\nRoots take up water and minerals.", true]],
    run: async ({ query, documents }, model) => {
      const body = { query, texts: lines(documents), return_text: true, model: model.name };
      return rank(await (await post("/rerank", body)).json());
    },
  },
  labels: {
    title: "Labels", ability: "predict", unless: ["label_tokens", "rerank"],
    fields: [["text", "Text", "What a wonderful day.", true]],
    run: async ({ text }, model) => {
      const found = await (await post("/predict", { inputs: text, model: model.name })).json();
      return rank(found.map(each => ({ text: each.label, score: each.score })));
    },
  },
  entities: {
    title: "Entities", ability: "label_tokens",
    fields: [["text", "Text", "Ada Lovelace was born in London.", true]],
    run: async ({ text }, model) => {
      const entities = await (await post("/token-classification", { inputs: text, model: model.name })).json();
      return [marked(text, entities), make("p", { className: "soft" }, `${entities.length} entities`)];
    },
  },
  question: {
    title: "Question", ability: "answer",
    fields: [["question", "Question", "Where was Ada born?"],
      ["context", "Context", "Ada Lovelace was born in London in 1815.", true]],
    run: async ({ question, context }, model) => {
      const found = await (await post("/question-answering", { inputs: { question, context }, model: model.name })).json();
      return [make("div", { className: "big" }, found.answer || "no answer"),
        marked(context, found.answer ? [{ ...found, entity_group: "answer" }] : []),
        make("p", { className: "soft" }, `probability ${found.score.toFixed(4)}`)];
    },
  },
  mask: {
    title: "Masked word", ability: "fill_mask",
    fields: [["text", "Text with a mask", "The capital of France is [MASK].", true]],
    run: async ({ text }, model) => {
      const found = await (await post("/fill-mask", { inputs: text, model: model.name })).json();
      const masks = Array.isArray(found[0]) ? found : [found];
      return masks.flatMap(each => rank(each.map(guess => ({ text: guess.token_str, score: guess.score }))));
    },
  },
  prompt: {
    title: "Prompt", ability: "complete",
    fields: [["prompt", "Prompt", "The state of the union is", true], ["max_tokens", "New tokens", "48"],
      ["temperature", "Temperature", "0.8"]],
    run: async ({ prompt, max_tokens, temperature }, model, show) => {
      const body = { model: model.name, prompt, stream: true, max_tokens: Number(max_tokens),
        temperature: Number(temperature) };
      const response = await post("/v1/completions", body);
      const shown = make("pre", {}, make("b", {}, prompt));
      show([shown]);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const data = event.replace(/^data: /, "");
          if (data === "[DONE]") continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Error(chunk.error.message);
          shown.append(chunk.choices.map(choice => choice.text).join(""));
        }
      }
      return null;
    },
  },
};

// ---- the playground -------------------------------------------------------------------------------------------------

function offered() {
  return Object.entries(TOOLS).filter(([, tool]) => able(tool).length);
}

function select(name) {
  const tool = TOOLS[name];
  for (const tab of byId("tabs").children) tab.setAttribute("aria-selected", String(tab.dataset.tool === name));
  byId("answer").replaceChildren();
  const found = able(tool);
  let model = found[0];
  const parts = tool.fields.map(([id, label, value, tall]) => {
    const text = model.mask ? value.replace("[MASK]", model.mask) : value;
    return make("label", {}, label, tall ? make("textarea", { name: id, value: text }) : make("input", { name: id, value: text }));
  });
  if (found.length > 1) {
    const choice = make("select", {}, ...found.map(({ name }) => make("option", {}, name)));
    choice.onchange = () => { model = found[choice.selectedIndex]; };
    parts.unshift(make("label", {}, "Model", choice));
  }
  const send = make("button", { className: "send", type: "submit" }, "Send");
  byId("form").replaceChildren(...parts, send);
  byId("form").onsubmit = async event => {
    event.preventDefault();
    send.disabled = true;
    const show = children => byId("answer").replaceChildren(...children);
    try {
      const values = Object.fromEntries(new FormData(byId("form")));
      const children = await tool.run(values, model, show);
      if (children) show(children);
    } catch (error) {
      show([make("p", { className: "error" }, error.message)]);
    } finally { send.disabled = false; }
  };
}

function buildTabs() {
  const tools = offered();
  byId("tabs").replaceChildren(...tools.map(([name, tool]) => {
    const tab = make("button", { type: "button", onclick: () => select(name) }, tool.title);
    tab.dataset.tool = name;
    tab.setAttribute("role", "tab");
    return tab;
  }));
  if (tools.length) select(tools[0][0]);
}

// ---- numbers --------------------------------------------------------------------------------------------------------

const shortened = value => value == null ? "–" : value >= 1000 ? `${(value / 1000).toFixed(1)}k`
  : value >= 100 ? value.toFixed(0) : value.toFixed(1);

function draw() {
  const canvas = byId("chart");
  const scale = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const context = canvas.getContext("2d");
  const top = Math.max(1, ...history);
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  context.lineWidth = 2 * scale;
  context.beginPath();
  history.forEach((value, index) => {
    const x = canvas.width * (index + 120 - history.length) / 119;
    const y = canvas.height * (0.95 - 0.85 * value / top);
    index ? context.lineTo(x, y) : context.moveTo(x, y);
  });
  context.stroke();
}

async function refresh() {
  const pill = byId("health");
  try {
    const stats = await (await fetch("/stats")).json();
    pill.textContent = stats.healthy ? "healthy" : stats.reason;
    pill.className = `pill ${stats.healthy ? "good" : "bad"}`;
    byId("requests").textContent = shortened(stats.requests_per_second);
    byId("texts").textContent = shortened(stats.texts_per_second);
    byId("tokens").textContent = shortened(stats.tokens_per_second);
    byId("p50").textContent = shortened(stats.latency_ms.p50);
    byId("p99").textContent = shortened(stats.latency_ms.p99);
    byId("waiting").textContent = stats.waiting;
    history.push(stats.requests_per_second);
    if (history.length > 120) history.shift();
    draw();
    const known = JSON.stringify(stats.models);
    if (known !== models.known) {
      Object.assign(models, { known, list: stats.models });
      byId("models").tBodies[0].replaceChildren(...stats.models.map(model => make("tr", {},
        ...[model.name, model.kind, model.dtype, model.devices.join(", "), String(model.max_length)].map(cell =>
          make("td", {}, cell)))));
      buildTabs();
    }
  } catch {
    pill.textContent = "no answer";
    pill.className = "pill bad";
  }
  setTimeout(refresh, 1000);
}
refresh();
