// The API client: errors, event streams, and the key that the server may ask for.

import { byId } from "./dom.js";

const KEY = "ragkv-key";
let asking = null; // while the dialog is open: a promise of whether a key was given

export class ApiError extends Error {
  constructor(message, status = 0, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

// Return a response with status 2xx, or throw an ApiError. Asks for a key if the server needs one, unless `quiet`.
export async function request(path, { quiet = false, headers = {}, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const authorization = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await reach(path, { ...options, headers: { ...headers, ...authorization } });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401 || quiet || !(await keyOtherThan(key, error.message))) throw error;
  }
}

export const get = async (path, options) => (await request(path, options)).json();

export function post(path, body, options) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", body: JSON.stringify(body), headers, ...options });
}

// Yield each event of a stream, as [name, data].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(brokeOff);
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const { event, data } = Object.fromEntries(frame.split("\n").map((line) => line.split(/: (.*)/s)));
      if (data) yield [event, JSON.parse(data)];
    }
  }
}

function brokeOff(error) {
  throw error.name === "AbortError" ? error : new ApiError("the connection broke off");
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("the server can't be reached");
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answered ${response.status} ${response.statusText}`;
  return new ApiError(message, response.status, Number(response.headers.get("Retry-After")) || 1);
}

// Return whether there is another key to try: requests that are refused together open one dialog.
async function keyOtherThan(refused, message) {
  if (sessionStorage.getItem(KEY) !== refused) return true;
  asking ??= askForKey(refused && message).finally(() => (asking = null));
  return asking;
}

function askForKey(problem) {
  const dialog = byId("key-dialog");
  byId("key-problem").textContent = problem ?? "";
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const onClose = () => {
      const given = dialog.returnValue === "use";
      if (given) sessionStorage.setItem(KEY, byId("key").value.trim());
      resolve(given);
    };
    dialog.addEventListener("close", onClose, { once: true });
  });
}
