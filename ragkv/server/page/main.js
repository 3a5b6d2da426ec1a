import { get } from "./api.js";
import { startAsking } from "./ask.js";
import { refreshDocuments, startDocuments } from "./documents.js";
import { byId } from "./dom.js";
import { startGauges } from "./gauges.js";
import { startOrigins } from "./origins.js";
import { startTimes } from "./times.js";
import { followJobs, startUploads } from "./uploads.js";

startAsking();
startTimes();
startOrigins();
startDocuments();
startUploads(refreshDocuments);

refreshDocuments() // asks for the key, if one is needed, before anything else does
  .then(startGauges)
  .then(() => get("/v1/models", { quiet: true }))
  .then(({ data }) => (byId("model").textContent = data[0].id))
  .then(followJobs)
  .catch(() => {}); // the status line says what is wrong
