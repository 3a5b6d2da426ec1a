// Files on their way into the index: a request and a job for each, so that a bad one stops no other.

import { get, request } from "./api.js";
import { byId, counted, element, showProblem } from "./dom.js";

const AT_A_TIME = 2;
const POLL_MS = 1000;

const waiting = []; // of files: each starts its own way
let underWay = 0;
let onIndexed = null;

// indexed: called after each document that is in.
export function startUploads(indexed) {
  onIndexed = indexed;
  const [drop, input] = [byId("drop"), byId("files")];
  input.addEventListener("change", () => {
    [...input.files].forEach(enqueue);
    input.value = ""; // so that the same file can be chosen again
  });
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    [...event.dataTransfer.items].filter((item) => item.kind === "file").forEach(take);
  });
  for (const type of ["dragover", "drop"]) addEventListener(type, (event) => event.preventDefault()); // dropped elsewhere, a file would replace the page
  byId("clear-uploads").addEventListener("click", clear);
  addEventListener("beforeunload", (event) => {
    if (waiting.length) event.preventDefault(); // what hasn't been sent would be lost
  });
}

// Follow jobs that are older than this page: of other clients, or of this tab before it was reloaded.
export async function followJobs() {
  const { jobs } = await get("/v1/jobs", { quiet: true });
  const open = jobs.filter(({ status }) => status === "waiting" || status === "running").reverse();
  open.forEach((job) => follow(job, item(job.names.join(", "))));
}

function take(dropped) {
  const file = dropped.getAsFile();
  if (dropped.webkitGetAsEntry()?.isDirectory) fail(item(file.name), new Error("is a folder: drop the files in it"));
  else enqueue(file);
}

function enqueue(file) {
  const shown = item(file.name);
  waiting.push(() => upload(file, shown));
  next();
}

function next() {
  while (underWay < AT_A_TIME && waiting.length) {
    underWay += 1;
    waiting.shift()().finally(() => {
      underWay -= 1;
      next();
    });
  }
}

async function upload(file, shown) {
  try {
    await follow(await send(file, shown), shown);
  } catch (error) {
    fail(shown, error);
  }
}

async function send(file, shown) {
  const body = new FormData();
  body.append("files", file);
  for (;;) {
    say(shown, "Sending");
    try {
      return await (await request("/v1/documents", { method: "POST", body })).json();
    } catch (error) {
      if (error.status !== 429) throw error;
      say(shown, `The server is busy: again in ${counted(error.retryAfterS, "second")}`);
      await pause(1000 * error.retryAfterS);
    }
  }
}

// Until the job has ended. A server that can't be reached for a while is asked again.
async function follow(job, shown) {
  while (job.status === "waiting" || job.status === "running") {
    say(shown, stageOf(job), job);
    await pause(POLL_MS);
    job = await get(`/v1/jobs/${encodeURIComponent(job.id)}`).catch((error) => {
      if (error.status) return { status: "failed", error: error.message };
      return job;
    });
  }
  const problems = job.error ?? [...(job.rejected ?? []), ...(job.report?.rejected ?? [])].join("; ");
  if (job.status === "failed" || problems) fail(shown, new Error(problems || "the server doesn't say why"));
  else finish(shown, job.report);
}

function stageOf({ status, names, stage, item: current, done, total, error }) {
  if (status === "waiting") return error ? `Waiting: ${error}` : "Waiting its turn";
  const what = stage === "prefill" ? "Prefilling" : "Reading";
  return total ? `${what} ${done} of ${total}${current && !names.includes(current) ? `: ${current}` : ""}` : what;
}

function finish(shown, report) {
  const isSame = report && !report.documents_new && !report.documents_changed;
  const prefilled = report ? `, ${counted(report.chunks_prefilled, "chunk")} prefilled` : "";
  say(shown, isSame ? "Unchanged since it was indexed" : `Indexed${prefilled}`);
  ended(shown);
  onIndexed();
}

function ended({ place, progress }) {
  progress.remove();
  place.classList.add("ended");
  byId("clear-uploads").hidden = false;
}

function clear() {
  byId("uploads").querySelectorAll(".ended").forEach((place) => place.remove());
  byId("clear-uploads").hidden = true;
  byId("files").focus();
}

function item(name) {
  const state = element("span", { className: "meta" });
  const progress = element("progress", { ariaLabel: `Progress of ${name}` });
  const place = element("li", {}, element("bdi", { className: "name" }, name), state, progress);
  byId("uploads").prepend(place);
  return { place, state, progress };
}

function say({ state, progress }, text, { done = 0, total = 0 } = {}) {
  state.textContent = text;
  if (total) Object.assign(progress, { max: total, value: done });
  else progress.removeAttribute("value"); // it isn't known how far it is
}

function fail(shown, error) {
  ended(shown);
  shown.state.className = "problem";
  shown.state.role = "alert";
  showProblem(shown.state, error);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
