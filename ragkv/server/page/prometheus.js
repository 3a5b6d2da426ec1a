// A reader of Prometheus' text format, as far as this server writes it, and sums over time.

// Return each series' value, by the series as it is written: `name{label="value"}`.
export function parse(text) {
  const lines = text.split("\n").filter((line) => line && !line.startsWith("#"));
  return new Map(lines.map((line) => line.split(/ (?=[^ ]*$)/)).map(([series, value]) => [series, Number(value)]));
}

// Return the series of a metric that has one label, by the label's value.
export function labelled(samples, metric) {
  const found = new Map();
  for (const series of samples.keys()) {
    const match = series.startsWith(`${metric}{`) && series.match(/="((?:[^"\\]|\\.)*)"\}$/);
    if (match) found.set(match[1].replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c)), series);
  }
  return found;
}

// Return by how much a counter grew over a history, an array of samples. Counters restart at 0 with the server.
export function increase(history, series) {
  let sum = 0;
  for (let i = 1; i < history.length; i++) {
    const [before, now] = [history[i - 1], history[i]].map((samples) => samples.get(series) ?? 0);
    sum += now < before || hasRestarted(history[i - 1], history[i]) ? now : now - before;
  }
  return sum;
}

// Return the mean of what a histogram observed over a history; null if it observed nothing.
export function mean(history, metric, labels = "") {
  const observed = increase(history, `${metric}_count${labels}`);
  return observed ? increase(history, `${metric}_sum${labels}`) / observed : null;
}

const START = "process_start_time_seconds";
const hasRestarted = (before, now) => before.get(START) !== now.get(START);
