// Markdown as elements, never as HTML: what a model writes is untrusted. The part of Markdown that models write in
// answers; what isn't understood stays text.

import { element } from "./dom.js";

const DEPTH = 8; // of quotes and lists in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((each) => each.test(line)); // another block

// Show a text's blocks in `place`. Those that are as they were stay: a selection in them too, and nothing flickers.
export function showMarkdown(place, text) {
  const made = blocks(text.split("\n"), 0);
  const same = made.findIndex((node, i) => !place.childNodes[i]?.isEqualNode(node));
  if (same === -1 && made.length === place.childNodes.length) return;
  const first = same === -1 ? made.length : same;
  while (place.childNodes.length > first) place.lastChild.remove();
  place.append(...made.slice(first));
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  // Takes lines as long as they pass, and returns them.
  const take = (passes) => {
    const from = at;
    while (at < lines.length && passes(lines[at])) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const [, fence] = FENCE.exec(line) ?? [];
    const [, marks, title] = HEADING.exec(line) ?? [];
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      at += 1;
      const code = take((next) => !(next.trim().startsWith(fence) && !next.trim().replaceAll(fence[0], "")));
      at += 1;
      made.push(element("pre", {}, element("code", {}, code.join("\n"))));
    } else if (marks) {
      at += 1;
      made.push(element(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(title.replace(/\s+#+\s*$/, ""))));
    } else if (RULE.test(line)) {
      at += 1;
      made.push(element("hr"));
    } else if (QUOTE.test(line) && depth < DEPTH) {
      const quoted = take((next) => QUOTE.test(next)).map((next) => next.replace(QUOTE, ""));
      made.push(element("blockquote", {}, ...blocks(quoted, depth + 1)));
    } else if (ITEM.test(line) && depth < DEPTH) {
      made.push(list(take, depth));
    } else if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      const [head, , ...rows] = take((next) => next.includes("|"));
      made.push(table(head, rows));
    } else {
      at += 1;
      const more = take((next) => next.trim() && !begins(next));
      made.push(element("p", {}, ...inline([line, ...more].join("\n"))));
    }
  }
  return made;
}

// A list: its items have markers of one kind; what is indented below a marker, or follows without a blank line, is theirs.
function list(take, depth) {
  const kind = (marker) => (/\d/.test(marker) ? marker.at(-1) : marker);
  let [first] = take(atMost(1));
  const [, , opening] = ITEM.exec(first);
  const items = [];
  const start = /\d/.test(opening) ? Number.parseInt(opening, 10) : null;
  while (first !== undefined) {
    const [whole] = ITEM.exec(first);
    const indent = " ".repeat(Math.min(whole.length, whole.trimEnd().length + 1));
    let blank = false;
    const own = take((line) => {
      const inside = line.startsWith(indent) || !line.trim() || !(blank || begins(line));
      blank = !line.trim();
      return inside;
    });
    const lines = [first.slice(whole.length), ...own.map((line) => line.replace(new RegExp(`^ {0,${indent.length}}`), ""))];
    items.push(element("li", {}, ...tight(blocks(lines, depth + 1))));
    [first] = take(atMost(1, (line) => ITEM.test(line) && kind(ITEM.exec(line)[2]) === kind(opening)));
  }
  return start === null ? element("ul", {}, ...items) : element("ol", { start }, ...items);
}

// Passes so many lines.
function atMost(number, passes = () => true) {
  return (line) => number-- > 0 && passes(line);
}

// The text of an item that begins with a paragraph stands in the item itself.
function tight(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function table(head, rows) {
  const row = (tag, line, size) =>
    element("tr", {}, ...cells(line, size).map((cell) => element(tag, {}, ...inline(cell))));
  const size = cells(head).length;
  const body = element("tbody", {}, ...rows.map((line) => row("td", line, size)));
  const made = element("table", {}, element("thead", {}, row("th", head, size)), body);
  return element("div", { className: "wide", role: "group", ariaLabel: "Table", tabIndex: 0 }, made);
}

function cells(line, size) {
  const parts = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  const found = parts.map((part) => part.trim().replaceAll("\\|", "|"));
  return size ? Array.from({ length: size }, (_, i) => found[i] ?? "") : found;
}

// What may stand in a line, the most specific first: an expression, and what it becomes; null leaves it as text.
const WITHIN = "([^\\s](?:[^]{0,1000}?[^\\s])??)";
const SPANS = [
  [/\\([!-/:-@[-`{-~])/y, ([, char]) => char],
  [/(`+)(?!`)([^]{0,2000}?[^`])\1(?!`)/y, ([, , code]) => element("code", {}, code.replace(/^ (.*[^ ].*) $/s, "$1"))],
  [/!?\[([^[\]]{0,300})\]\(<?([^\s<>]{0,2000}?)>?(?:\s+"[^"]{0,300}")?\)(?!\))/y, ([, text, url]) => link(url, text || url)],
  [/<(https?:\/\/[^\s<>]{1,2000})>/y, ([, url]) => link(url, url)],
  [/https?:\/\/[^\s<>"]{0,2000}[^\s<>".,;:!?)\]'*_`|]/y, ([url]) => link(url, url)],
  [new RegExp(`\\*\\*${WITHIN}\\*\\*(?!\\*)`, "y"), ([, text]) => element("strong", {}, ...inline(text))],
  [new RegExp(`\\*(?!\\*)${WITHIN}(?<!\\*)\\*(?!\\*)`, "y"), ([, text]) => element("em", {}, ...inline(text))],
  [new RegExp(`(?<![\\w_])__${WITHIN}__(?!\\w)`, "y"), ([, text]) => element("strong", {}, ...inline(text))],
  [new RegExp(`(?<![\\w_])_(?!_)${WITHIN}(?<!_)_(?!\\w)`, "y"), ([, text]) => element("em", {}, ...inline(text))],
  [new RegExp(`~~${WITHIN}~~`, "y"), ([, text]) => element("del", {}, ...inline(text))],
];

function inline(text) {
  const made = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const [node, length] = spanAt(text, at);
    if (node === null) {
      plain += text.slice(at, at + length);
    } else {
      if (plain) made.push(plain);
      plain = "";
      made.push(node);
    }
    at += length;
  }
  return plain ? [...made, plain] : made;
}

// Return what begins at a place of a text, or null, and how long it is.
function spanAt(text, at) {
  if (/[\\`![<h*_~]/.test(text[at])) {
    for (const [expression, make] of SPANS) {
      expression.lastIndex = at;
      const found = expression.exec(text);
      const node = found && make(found);
      if (node) return [node, found[0].length];
    }
  }
  return [null, 1];
}

// A link to the web; other addresses (javascript:, data:, paths of this server) are no links.
function link(url, text) {
  if (!/^https?:\/\//i.test(url) || !URL.canParse(url)) return null;
  const shown = /https?:/.test(text) ? [text] : inline(text); // a link has no link in it
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...shown);
}
