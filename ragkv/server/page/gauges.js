// The gauges: the server's metrics, read every two seconds while the page is visible.

import { request } from "./api.js";
import { byId, count, counted, element, milliseconds, row, share, swatch } from "./dom.js";
import { increase, labelled, mean, parse } from "./prometheus.js";

const EVERY_MS = 2000;
const WINDOW_MS = 60_000;
const SOURCES = { prefix: "prefix cache", reused: "reused", recomputed: "computed" };

let history = []; // [time, samples] of the last minute
let timer = null;

export function startGauges() {
  document.addEventListener("visibilitychange", poll);
  poll();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    if (!byId("gauges").hidden) await showMetrics();
    await request("/readyz", { quiet: true });
    setStatus("ready", "Ready");
  } catch (error) {
    setStatus("not-ready", error.status === 401 ? "Needs a key" : error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, EVERY_MS);
}

// Show the metrics, unless the key is a tenant's: those are refused.
async function showMetrics() {
  const metrics = await request("/metrics", { quiet: true }).catch((error) => {
    if (error.status !== 403) throw error;
  });
  byId("gauges").hidden = !metrics;
  if (!metrics) return;
  const now = performance.now();
  history = [...history.filter(([time]) => time > now - WINDOW_MS), [now, parse(await metrics.text())]];
  show(history.map(([, samples]) => samples));
}

// Change the text only if it differs: screen readers read each change out.
function setStatus(state, text) {
  const place = byId("status");
  if (place.textContent !== text) place.textContent = text;
  place.dataset.state = state;
}

function show(samples) {
  const now = samples.at(-1);
  byId("in-progress").textContent = count(now.get("ragkv_requests_in_progress") ?? 0);
  const between = mean(samples, "ragkv_inter_token_seconds");
  byId("inter-token").textContent = between === null ? "–" : milliseconds(1000 * between);
  showPromptTokens(now);
  showFirstTokens(samples);
  showEvents(now);
}

function showPromptTokens(now) {
  const series = labelled(now, "ragkv_prompt_tokens_total");
  const tokens = Object.keys(SOURCES).map((source) => [source, now.get(series.get(source)) ?? 0]);
  const total = tokens.reduce((sum, [, number]) => sum + number, 0);
  const { reused = 0 } = Object.fromEntries(tokens);
  byId("share-reused").textContent = share(reused, total);
  byId("prompt-tokens").replaceChildren(
    ...tokens.map(([source, number]) => row([swatch({ source }), SOURCES[source]], count(number), share(number, total))),
  );
  const parts = tokens.map(([source, number]) => {
    const part = element("span", { dataset: { source } });
    part.style.flexGrow = number;
    return part;
  });
  byId("prompt-bar").replaceChildren(...parts);
}

function showFirstTokens(samples) {
  const rows = [];
  for (const [policy, series] of labelled(samples.at(-1), "ragkv_ttft_seconds_count")) {
    const answers = increase(samples, series);
    const labels = series.slice(series.indexOf("{"));
    if (answers) rows.push(row(policy, milliseconds(1000 * mean(samples, "ragkv_ttft_seconds", labels)), counted(answers, "answer")));
  }
  byId("ttft").replaceChildren(...rows);
  byId("no-ttft").hidden = rows.length > 0;
}

function showEvents(now) {
  const events = [...labelled(now, "ragkv_kv_events_total")].map(([event, series]) => row(event, count(now.get(series))));
  byId("kv-events").replaceChildren(...events);
  byId("no-kv-events").hidden = events.length > 0;
}
