// What took how long, and how a full prefill compares: as the controller expects it, or measured.

import { byId, counted, element, milliseconds, row, share, showProblem, swatch } from "./dom.js";

const STAGES = {
  retrieve: "Retrieve the sources",
  load: "Load stored KV",
  probe: "Probe: what the question attends to",
  recompute: "Recompute",
  rest: "Rest of the time to first token",
  decode: "Decode",
};
const OF_FIRST_TOKEN = ["load", "probe", "recompute", "rest"];

let shown = 0; // counts answers, so that a measurement is never compared with another answer's times

export function startTimes() {
  byId("measure").addEventListener("click", () => measure?.());
}

let measure = null;

export function hideTimes() {
  shown += 1;
  byId("times-card").hidden = true;
}

// measured: a function that asks the same question with a full prefill.
export function showTimes(done, measured) {
  const { timings, plan } = done;
  const stages = stagesOf(timings);
  byId("times-card").hidden = false;
  byId("times").replaceChildren(...parts(stages, Object.keys(STAGES)));
  byId("stages").replaceChildren(
    ...Object.entries(STAGES).map(([stage, name]) =>
      row([swatch({ stage }), name], milliseconds(stages[stage]), share(stages[stage], timings.total_ms)),
    ),
    row("Altogether", milliseconds(timings.total_ms), "100%"),
  );
  showProblem(byId("measure-problem"), null);
  byId("measure").disabled = false;
  compare(done, plan && { ttft_ms: plan.prefill_ms, isExpected: true });
  measure = () => measureNow(done, measured);
}

async function measureNow(done, measured) {
  const answer = shown;
  byId("measure").disabled = true;
  byId("ratio").textContent = "Measuring a full prefill of the same prompt…";
  showProblem(byId("measure-problem"), null);
  try {
    const full = await measured();
    if (shown === answer) compare(done, { ttft_ms: full.timings.ttft_ms, usage: full.usage });
  } catch (error) {
    if (shown !== answer) return;
    byId("ratio").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showProblem(byId("measure-problem"), error);
  } finally {
    if (shown === answer) byId("measure").disabled = false;
  }
}

function stagesOf(timings) {
  const { retrieve_ms: retrieve, load_ms: load, probe_ms: probe, recompute_ms: recompute, ttft_ms, total_ms } = timings;
  const rest = Math.max(0, ttft_ms - load - probe - recompute);
  return { retrieve, load, probe, recompute, rest, decode: Math.max(0, total_ms - retrieve - ttft_ms) };
}

// The parts of a bar that is as long as their sum.
function parts(stages, names) {
  return names.filter((name) => stages[name] > 0).map((name) => part({ stage: name }, stages[name]));
}

function part(dataset, size) {
  const made = element("span", { dataset });
  made.style.flexGrow = size;
  return made;
}

// full: the full prefill to compare with, or null if nothing is known of it.
function compare({ timings, usage }, full) {
  const longest = Math.max(timings.ttft_ms, full?.ttft_ms ?? 0);
  const rest = (ttft) => part({ stage: "nothing" }, longest - ttft);
  byId("own-bar").replaceChildren(...parts(stagesOf(timings), OF_FIRST_TOKEN), rest(timings.ttft_ms));
  byId("own-ms").textContent = milliseconds(timings.ttft_ms);
  const stage = full?.isExpected ? "expected" : "prefill";
  byId("full-bar").replaceChildren(...(full ? [part({ stage }, full.ttft_ms), rest(full.ttft_ms)] : []));
  byId("full-name").textContent = `Full prefill, ${full && !full.isExpected ? "measured" : "expected"}`;
  byId("full-ms").textContent = full ? milliseconds(full.ttft_ms) : "not known";
  byId("measure").textContent = full?.usage ? "Measure again" : "Measure it";
  byId("ratio").textContent = full ? verdict(timings.ttft_ms, usage, full) : "";
}

function verdict(ttft, usage, full) {
  const ratio = full.ttft_ms / ttft;
  const prefill = full.isExpected ? "a full prefill is expected to be" : "full prefill";
  const sentences = [
    ratio < 1.05
      ? `The first token came no faster than ${full.isExpected ? "is expected of a full prefill" : "by full prefill"}.`
      : `The first token came ${ratio.toLocaleString("en", { maximumFractionDigits: 1 })} times as fast as ${prefill}.`,
  ];
  const inMemory = usage.prefix_tokens - usage.stored_prefix_tokens;
  if (inMemory) sentences.push(`${counted(inMemory, "token")} came from vLLM's prefix cache.`);
  if (usage.stored_prefix_tokens) {
    sentences.push(`${counted(usage.stored_prefix_tokens, "token")} came from an earlier prompt's KV on the disk.`);
  }
  if (full.usage && full.usage.prompt_tokens !== usage.prompt_tokens) {
    sentences.push(`The documents changed meanwhile: the measured prompt has ${counted(full.usage.prompt_tokens, "token")}.`);
  }
  return sentences.join(" ");
}
