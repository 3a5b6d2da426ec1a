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
