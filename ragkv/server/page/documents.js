// The indexed documents: a list that is loaded page by page, their chunks, and their deletion.

import { get, request } from "./api.js";
import { byId, bytes, count, counted, element, shortNames, showProblem } from "./dom.js";

const PAGE = 100;

let loaded = []; // documents, by name
let next = ""; // the name after which the next page begins; null after the last one
let numShown = PAGE; // how many are to be shown
let items = new Map(); // what is shown, by the document and its short name as JSON: what is unchanged stays open
let latest = 0; // number of the newest load, so that an older one never overwrites it

export function startDocuments() {
  byId("filter").addEventListener("input", () => {
    numShown = PAGE;
    fill();
  });
  byId("more").addEventListener("click", () => {
    numShown += PAGE;
    fill();
  });
}

// Load the list again, as many documents as were shown.
export function refreshDocuments() {
  [loaded, next] = [[], ""];
  return fill();
}

// Pages are loaded until enough of their documents match the filter: the server knows no filter.
async function fill() {
  const own = (latest += 1);
  showProblem(byId("documents-problem"), null);
  try {
    while (matching().length < numShown && next !== null) {
      const after = next && `&after=${encodeURIComponent(next)}`;
      const page = await get(`/v1/documents?limit=${PAGE}${after}`);
      if (own !== latest) return;
      loaded.push(...page.documents);
      next = page.next;
      if (matching().length < numShown) show();
    }
    show();
  } catch (error) {
    if (own === latest) showProblem(byId("documents-problem"), error);
  }
}

function matching() {
  const part = byId("filter").value.trim().toLowerCase();
  return loaded.filter(({ name, title }) => `${name}\n${title}`.toLowerCase().includes(part));
}

function show() {
  const documents = matching().slice(0, numShown);
  const focused = document.activeElement;
  const isAll = next === null && matching().length === documents.length;
  const filtered = byId("filter").value.trim() ? " found" : "";
  byId("num-documents").textContent = `${counted(documents.length, "document")}${filtered}${isAll ? "" : ", and more"}`;
  byId("no-documents").hidden = loaded.length > 0;
  byId("more").hidden = isAll;
  const shorts = shortNames(documents.map(({ name }) => name));
  const entries = documents.map((document) => [document, shorts.get(document.name)]);
  items = new Map(
    entries.map((entry) => [JSON.stringify(entry), items.get(JSON.stringify(entry)) ?? documentItem(...entry)]),
  );
  byId("documents").replaceChildren(...items.values());
  if (focused !== document.activeElement) focused.focus({ preventScroll: true });
}

function documentItem(info, short) {
  const { name, title, num_chunks, num_tokens } = info;
  const facts = `${counted(num_chunks, "chunk")} · ${counted(num_tokens, "token")}`;
  const about = title && title !== name && title !== short ? [element("span", { className: "meta", dir: "auto" }, title)] : [];
  const summary = element(
    "summary",
    {},
    element("bdi", { className: "name", title: name }, short),
    ...about,
    element("span", { className: "meta" }, facts),
  );
  const chunks = element("div", { className: "chunks" });
  const details = element("details", {}, summary, chunks);
  details.addEventListener("toggle", () => details.open && !chunks.querySelector("details") && addChunks(info, chunks));
  const button = element("button", { type: "button", className: "plain", ariaLabel: `Delete ${name}` }, "Delete");
  const item = element("li", {}, details, button);
  button.addEventListener("click", () => remove(info, item));
  return item;
}

// Append the next chunks to those that are shown; the server chooses how many it returns.
async function addChunks({ name, num_chunks }, place) {
  place.querySelector(":scope > .problem")?.remove();
  const more = place.querySelector(":scope > button");
  const shown = place.querySelectorAll(":scope > details").length;
  try {
    const { chunks } = await get(`${pathOf(name)}?offset=${shown}`);
    more?.remove();
    place.append(...chunks.map(chunkItem));
    if (!chunks.length || shown + chunks.length >= num_chunks) return;
    const button = element("button", { type: "button", className: "plain" }, "Show more chunks");
    button.addEventListener("click", () => addChunks({ name, num_chunks }, place));
    place.append(button);
  } catch (error) {
    place.append(problem(error));
  }
}

function chunkItem({ ordinal, num_tokens, text, stored }) {
  const kv = stored ? "KV stored" : "KV not stored";
  const summary = element("summary", {}, `Chunk ${count(ordinal + 1)} · ${counted(num_tokens, "token")} · ${kv}`);
  return element("details", {}, summary, element("p", { className: "text", dir: "auto" }, text));
}

async function remove(info, item) {
  const { name, num_chunks, num_tokens } = info;
  byId("deletion-name").textContent = name;
  byId("deletion-what").textContent =
    `This takes ${counted(num_chunks, "chunk")} (${counted(num_tokens, "token")}) out of the index and deletes their ` +
    "stored KV, but for chunks that other documents have too.";
  if (!(await confirmed())) return;
  item.querySelector(":scope > .problem")?.remove();
  try {
    const deletion = await (await request(pathOf(name), { method: "DELETE" })).json();
    const kept = deletion.num_shared ? `, ${count(deletion.num_shared)} of them kept for other documents` : "";
    const size = `${bytes(deletion.size_bytes)} of KV freed`;
    byId("documents-state").textContent = `Deleted ${name}: ${counted(deletion.num_chunks, "chunk")}${kept}, ${size}.`;
    byId("filter").focus(); // the button that had the focus is deleted
    await refreshDocuments();
  } catch (error) {
    item.append(problem(error));
  }
}

function confirmed() {
  const dialog = byId("deletion");
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "delete"), { once: true });
  });
}

function problem(error) {
  const place = element("p", { className: "problem", role: "alert" });
  showProblem(place, error);
  return place;
}

const pathOf = (name) => `/v1/documents/${encodeURIComponent(name)}`;
