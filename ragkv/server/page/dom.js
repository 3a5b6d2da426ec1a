// Elements, and numbers as text. Text is set as text only: names and documents are untrusted.

export const byId = (id) => document.getElementById(id);

export function element(tag, { dataset = {}, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

// A row of a table: its heading, then its cells.
export function row(heading, ...cells) {
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, ...[heading].flat()),
    ...cells.map((cell) => element("td", {}, cell)),
  );
}

export const swatch = (dataset) => element("i", { className: "swatch", dataset, ariaHidden: "true" });

// Return the short name of each document: its file's, with as many of its folders as tell it from the others.
export function shortNames(names) {
  const found = new Map();
  let left = [...new Set(names)].map((name) => [name, partsOf(name)]);
  for (let size = 1; left.length; size += 1) {
    const shorts = left.map(([, parts]) => parts.slice(-size).join("/"));
    const counts = new Map();
    for (const short of shorts) counts.set(short, (counts.get(short) ?? 0) + 1);
    const isFound = (i) => counts.get(shorts[i]) === 1 || size >= left[i][1].length;
    left.forEach(([name], i) => isFound(i) && found.set(name, shorts[i]));
    left = left.filter((_, i) => !isFound(i));
  }
  return found;
}

// The folders and the file of a document's name; a record of a JSONL file belongs to the file.
function partsOf(name) {
  const [, path, record] = /^(.*?\.jsonl)(#.*)$/is.exec(name) ?? [null, name, ""];
  const parts = path.split("/");
  return [...parts.slice(0, -1), parts.at(-1) + record];
}

// Shows an error in its place, in the server's words, or takes it away.
export function showProblem(place, error) {
  place.textContent = error ? error.message : "";
  place.hidden = !error;
}

export const count = (number) => number.toLocaleString("en");

export const counted = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toLocaleString("en", { maximumFractionDigits: 1 })} s`;
  return `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 })} ms`;
}

export function share(part, whole) {
  if (!whole) return "–";
  return `${((100 * part) / whole).toLocaleString("en", { maximumFractionDigits: 1 })}%`;
}

export function bytes(number) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log2(number || 1) / 10)));
  const value = number / 1024 ** power;
  return `${value.toLocaleString("en", { maximumFractionDigits: 1 })} ${["bytes", "KiB", "MiB", "GiB"][power]}`;
}
