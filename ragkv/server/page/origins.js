// A prompt's tokens as cells on canvases, one for each group. One slider goes through all of them: the pointer or the
// arrow keys choose a token, and the line above says what it is. prompt.js shows the same in tables.

import { byId, count, element } from "./dom.js";

// In the order of what they cost. `recomputed` and `computed` are work, the others are reused.
export const KINDS = {
  prefix: ["Prefix cache", "vLLM had it from an earlier prompt"],
  stored: ["Prefix, disk", "an earlier prompt's KV, loaded from disk"],
  memory: ["Reused, memory", "stored KV that was in memory"],
  disk: ["Reused, disk", "stored KV, loaded from disk"],
  recomputed: ["Recomputed", "stored, computed again because it matters to the question"],
  computed: ["Computed", "no stored KV: the question, and what was missing"],
};

const [PITCH, ROW] = [6, 18]; // CSS pixels from cell to cell
const [WIDTH, HEIGHT] = [5, 14]; // of a cell
const HEIGHTS = { prefix: 3, stored: 5, memory: 7, disk: 10, recomputed: HEIGHT, computed: HEIGHT };
const CONTEXT = 14; // tokens shown on either side of the chosen one

let drawn = null; // the prompt whose tokens are on the canvases
const slider = byId("origins");

export function startOrigins() {
  new ResizeObserver(([{ contentRect }]) => contentRect.width !== drawn?.width && drawAll()).observe(slider);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  slider.addEventListener("keydown", onKey);
  slider.addEventListener("focus", () => choose(drawn.chosen));
  slider.addEventListener("pointermove", onPointer);
  slider.addEventListener("pointerdown", onPointer);
}

export function clearOrigins() {
  drawn = null;
  slider.replaceChildren();
}

// groups: {name, start, end, runs}, which cover all tokens in order.
export function drawOrigins(prompt, groups) {
  const kinds = prompt.runs.flatMap(({ start, end, kind }) => Array(end - start).fill(kind));
  const drawnGroups = groups.map((group) => {
    const canvas = element("canvas");
    const size = element("span", { className: "meta" }, count(group.end - group.start));
    const label = element("p", { className: "label", dir: "auto" }, element("bdi", {}, group.name), " ", size);
    slider.append(label, canvas);
    return { ...group, canvas };
  });
  drawn = { tokens: prompt.tokens, runs: prompt.runs, kinds, groups: drawnGroups, chosen: 0, columns: 1 };
  slider.ariaValueMax = kinds.length;
  drawAll();
  choose(0);
}

function drawAll() {
  if (!drawn) return;
  const style = getComputedStyle(slider);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  drawn.colours = Object.fromEntries([...Object.keys(KINDS), "track", "text"].map((name) => [name, colour(name)]));
  drawn.width = slider.clientWidth;
  drawn.columns = Math.max(1, Math.floor((drawn.width + PITCH - WIDTH) / PITCH));
  drawn.groups.forEach(draw);
}

function draw(group) {
  const { kinds, colours, columns, chosen } = drawn;
  const { canvas, start, end } = group;
  const rows = Math.ceil((end - start) / columns);
  const [width, height, scale] = [columns * PITCH, rows * ROW, devicePixelRatio];
  canvas.width = Math.ceil(width * scale);
  canvas.height = Math.ceil(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  for (let token = start; token < end; token++) {
    const [x, y] = cellOf(token - start);
    const filled = HEIGHTS[kinds[token]];
    context.fillStyle = colours.track;
    context.fillRect(x, y, WIDTH, HEIGHT - filled);
    context.fillStyle = colours[kinds[token]];
    context.fillRect(x, y + HEIGHT - filled, WIDTH, filled);
    if (kinds[token] === "recomputed") stripe(context, x, y);
  }
  if (chosen < start || chosen >= end) return;
  const [x, y] = cellOf(chosen - start);
  context.strokeStyle = colours.text;
  context.lineWidth = 2;
  context.strokeRect(Math.max(1, x - 1), Math.max(1, y - 1), WIDTH + 2, HEIGHT + 2);
}

function stripe(context, x, y) {
  context.fillStyle = drawn.colours.track;
  for (const down of [3, 7, 11]) context.fillRect(x, y + down, WIDTH, 1);
}

const cellOf = (index) => [(index % drawn.columns) * PITCH, Math.floor(index / drawn.columns) * ROW + 1];

const groupOf = (token) => drawn.groups.find(({ end }) => token < end);

function choose(token) {
  const before = groupOf(drawn.chosen);
  drawn.chosen = Math.min(Math.max(token, 0), drawn.kinds.length - 1);
  const group = groupOf(drawn.chosen);
  draw(group);
  if (before !== group) draw(before);
  tell(group);
}

function tell(group) {
  const { tokens, kinds, chosen } = drawn;
  const [kind] = KINDS[kinds[chosen]];
  const position = `Token ${count(chosen + 1)} of ${count(tokens.length)}`;
  byId("token-facts").replaceChildren(`${position} · ${kind} · `, element("bdi", {}, group.name));
  byId("token-before").textContent = visible(tokens.slice(Math.max(0, chosen - CONTEXT), chosen));
  byId("token").textContent = visible([tokens[chosen]]);
  byId("token-after").textContent = visible(tokens.slice(chosen + 1, chosen + 1 + CONTEXT));
  slider.ariaValueNow = chosen + 1;
  slider.ariaValueText = `${position}: “${tokens[chosen]}”, ${kind}, ${group.name}`;
}

const visible = (tokens) => tokens.join("").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

function onPointer(event) {
  const group = drawn?.groups.find(({ canvas }) => canvas === event.target);
  if (!group) return;
  const column = Math.min(Math.floor(event.offsetX / PITCH), drawn.columns - 1);
  const token = group.start + Math.floor(event.offsetY / ROW) * drawn.columns + column;
  if (token >= group.start && token < group.end && token !== drawn.chosen) choose(token);
}

function onKey(event) {
  const { chosen, columns, kinds, runs } = drawn;
  const steps = {
    ArrowLeft: () => chosen - 1,
    ArrowRight: () => chosen + 1,
    ArrowUp: () => chosen - columns,
    ArrowDown: () => chosen + columns,
    PageUp: () => runs.findLast(({ start }) => start < chosen)?.start ?? 0,
    PageDown: () => runs.find(({ start }) => start > chosen)?.start ?? chosen,
    Home: () => 0,
    End: () => kinds.length - 1,
  };
  if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  choose(steps[event.key]());
  bringIntoView();
}

// The chosen cell, not only its canvas, which may be taller than the window.
function bringIntoView() {
  const group = groupOf(drawn.chosen);
  const top = group.canvas.getBoundingClientRect().top + cellOf(drawn.chosen - group.start)[1];
  const [upper, lower] = [byId("token-line").getBoundingClientRect().height + ROW, innerHeight - 2 * ROW];
  if (top < upper) scrollBy(0, top - upper);
  if (top > lower) scrollBy(0, top - lower);
}
