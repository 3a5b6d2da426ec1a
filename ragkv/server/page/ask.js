// The question form, the answer as it streams, and its facts.

import { ApiError, events, post } from "./api.js";
import { byId, count, counted, element, milliseconds, shortNames, showProblem } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { hidePrompt, showPrompt } from "./prompt.js";
import { hideTimes, showTimes } from "./times.js";

let running = null; // the AbortController of the question being answered, or measured
let written = ""; // the answer so far
let frame = 0; // in which it will be drawn

export function startAsking() {
  const form = byId("ask-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(choices());
  });
  form.addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
}

// Return the form as a request body; the server's configuration fills in what is left empty.
function choices() {
  const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
  const percent = number("budget");
  return {
    question: byId("question").value,
    policy: byId("policy").value || undefined,
    budget: percent === undefined ? undefined : percent / 100,
    top_k: number("top-k"),
    max_tokens: number("max-tokens"),
  };
}

async function ask(body) {
  running?.abort();
  const own = (running = new AbortController());
  begin(body.question);
  try {
    const done = await answered({ ...body, stream: true, explain: true }, own.signal);
    if (running === own) showDone(done, body);
  } catch (error) {
    if (running !== own) return; // another question took its place
    if (error.name !== "AbortError") showProblem(byId("answer-problem"), error);
    byId("answer-state").textContent = error.name === "AbortError" ? "Stopped." : "";
  } finally {
    if (running === own) end();
  }
}

function begin(question) {
  hideTimes();
  hidePrompt();
  showProblem(byId("answer-problem"), null);
  byId("welcome").hidden = byId("sources-card").hidden = true;
  byId("answer-card").hidden = byId("stop").hidden = false;
  byId("asked").textContent = question;
  byId("answer").ariaBusy = "true"; // screen readers read it out once it is whole
  byId("reasoning").hidden = true;
  byId("answer").textContent = byId("answer-facts").textContent = byId("reasoning-text").textContent = written = "";
  byId("answer-state").textContent = "Looking for sources…";
}

function end() {
  draw();
  byId("answer").ariaBusy = "false";
  byId("stop").hidden = true;
  running = null;
}

// Add to the answer, which is drawn once a frame however many pieces come.
function write(text) {
  written += text;
  frame ||= requestAnimationFrame(draw);
}

function draw() {
  cancelAnimationFrame(frame);
  frame = 0;
  showMarkdown(byId("answer"), written);
}

// Show an answer as it streams, and return its `done` event.
async function answered(body, signal) {
  const response = await post("/v1/answer", body, { signal });
  let sources = [];
  for await (const [name, data] of events(response)) {
    if (signal.aborted) break;
    if (name === "sources") {
      sources = data.sources;
      showSources(sources);
      byId("answer-state").textContent = `Reading ${counted(sources.length, "source")}…`;
    } else if (name === "reasoning") {
      byId("answer-state").textContent = "Thinking…";
      byId("reasoning").hidden = false;
      byId("reasoning-text").append(data.text);
    } else if (name === "delta") {
      byId("answer-state").textContent = "Answering…";
      write(data.text);
    } else if (name === "error") {
      throw new ApiError(data.error.message);
    } else if (name === "done") {
      return { ...data, sources };
    }
  }
  signal.throwIfAborted();
  throw new ApiError("the answer broke off before its end");
}

function showDone(done, body) {
  const { usage, timings } = done;
  byId("answer-state").textContent = "";
  const cut = done.finish_reason === "length" ? ["cut off: allow a longer answer in the options"] : [];
  const facts = [
    `policy ${done.policy}`,
    `first token after ${milliseconds(timings.ttft_ms)}`,
    `${count(usage.completion_tokens)} tokens in ${milliseconds(timings.total_ms)}`,
    ...cut,
    ...(done.fallback ? [done.fallback] : []),
  ];
  byId("answer-facts").replaceChildren(...facts.map((fact) => element("li", {}, fact)));
  showTimes(done, () => measured(body));
  showPrompt(done);
}

// Ask the same question with a full prefill, reusing nothing. A new question or Stop ends it.
async function measured(body) {
  const own = (running = new AbortController());
  byId("stop").hidden = false;
  try {
    const full = { ...body, policy: "full", fresh: true, max_tokens: 1, budget: undefined };
    return await (await post("/v1/answer", full, { signal: own.signal })).json();
  } finally {
    if (running === own) end();
  }
}

function showSources(sources) {
  byId("sources-card").hidden = false;
  byId("num-sources").textContent = count(sources.length);
  const shorts = shortNames(sources.map(({ document }) => document));
  byId("sources").replaceChildren(...sources.map((source, i) => sourceItem(source, i, shorts.get(source.document))));
}

function sourceItem(source, index, short) {
  const place = [
    element("bdi", { title: source.document }, short),
    ` · chunk ${count(source.ordinal + 1)} · score ${source.score.toFixed(3)}`,
  ];
  const summary = element(
    "summary",
    {},
    element("b", { className: "number", ariaLabel: `Source ${index + 1}` }, String(index + 1)),
    element("span", { className: "title", dir: "auto" }, source.title || short),
    element("span", { className: "meta" }, ...place),
  );
  return element("li", {}, element("details", {}, summary, element("p", { className: "text", dir: "auto" }, source.text)));
}
