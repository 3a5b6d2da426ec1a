// Where each token of a prompt came from: the legend, the figures by source, and the token origins.

import { byId, count, counted, element, row, share, shortNames, swatch } from "./dom.js";
import { KINDS, clearOrigins, drawOrigins } from "./origins.js";

const NAMES = Object.keys(KINDS);

export function hidePrompt() {
  byId("prompt-card").hidden = true;
  clearOrigins();
}

export function showPrompt({ prompt, sources }) {
  if (!prompt) return;
  const groups = groupsOf(prompt.runs, prompt.tokens.length, sources);
  const totals = totalsOf(prompt.runs);
  const total = prompt.tokens.length;
  byId("prompt-card").hidden = false;
  const work = totals.recomputed + totals.computed;
  byId("prompt-summary").textContent =
    `${counted(total, "token")}, of which ${count(total - work)} (${share(total - work, total)}) were not computed.`;
  byId("kinds").replaceChildren(
    ...NAMES.map((kind) => {
      const [name, meaning] = KINDS[kind];
      const heading = [swatch({ kind }), name, " ", element("span", { className: "meta" }, meaning)];
      return row(heading, count(totals[kind]), share(totals[kind], total));
    }),
  );
  byId("by-source").replaceChildren(
    ...groups.map(({ name, runs }) => {
      const own = totalsOf(runs);
      const size = NAMES.reduce((sum, kind) => sum + own[kind], 0);
      return row(element("bdi", {}, name), count(size), ...NAMES.map((kind) => count(own[kind])));
    }),
  );
  drawOrigins(prompt, groups);
}

// Runs in a row that belong to the same source, or to none.
function groupsOf(runs, total, sources) {
  const groups = [];
  for (const run of runs) {
    const last = groups.at(-1);
    if (last && last.source === run.source) {
      last.runs.push(run);
      last.end = run.end;
    } else {
      groups.push({ source: run.source, start: run.start, end: run.end, runs: [run] });
    }
  }
  return groups.map((group) => ({ ...group, name: nameOf(group, total, sources) }));
}

function nameOf({ source, start, end }, total, sources) {
  if (source !== null) {
    const { title, document } = sources[source];
    return `${source + 1} ${title || shortNames(sources.map((each) => each.document)).get(document)}`;
  }
  if (start === 0) return "Instruction";
  return end === total ? "Question" : "Between";
}

function totalsOf(runs) {
  const totals = Object.fromEntries(NAMES.map((kind) => [kind, 0]));
  for (const { start, end, kind } of runs) totals[kind] += end - start;
  return totals;
}
