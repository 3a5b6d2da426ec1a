import { get } from "./api.js";
import { startAsking } from "./ask.js";
import { refreshDocuments, startDocuments } from "./documents.js";
import { byId } from "./dom.js";
import { startGauges } from "./gauges.js";
import { startStrip } from "./strip.js";
import { startTimes } from "./times.js";
import { followJobs, startUploads } from "./uploads.js";

startAsking();
startTimes();
startStrip();
startDocuments();
startUploads(refreshDocuments);

refreshDocuments() // asks for the key, if there is to be one, and only then anything else
  .then(startGauges)
  .then(() => get("/v1/models", { quiet: true }))
  .then(({ data }) => (byId("model").textContent = data[0].id))
  .then(followJobs)
  .catch(() => {}); // the status line says what is wrong
