// Says so when the numbers on the page stand still, and finds the way back after a restart.
"use strict";
(() => {
  const notice = document.getElementById("connection");
  const SILENT_MS = 5000;
  let heard = Date.now();
  let gone = false;

  function tell(text) {
    document.body.classList.toggle("stale", Boolean(text));
    if (notice.textContent !== text) notice.textContent = text;
    notice.hidden = !text;
  }

  document.body.addEventListener("htmx:sseMessage", () => { heard = Date.now(); tell(""); });
  document.body.addEventListener("htmx:sseError", () => {
    if (!gone) tell("The connection is lost; these numbers stand still. Trying again …");
  });
  document.body.addEventListener("htmx:sseClose", (event) => {
    if (event.detail.type !== "message") return;
    gone = true;
    tell("The server is shutting down. This page comes back when the server does.");
    // The stream was closed for good, so the page itself looks for the server; spread, as many may wait.
    const look = async () => {
      try {
        const answer = await fetch("/readyz", { cache: "no-store" });
        if (answer.ok) { location.reload(); return; }
      } catch { /* not back yet */ }
      setTimeout(look, 2000 + Math.random() * 2000);
    };
    setTimeout(look, 2000);
  });
  setInterval(() => {
    const silent = Date.now() - heard;
    if (!gone && silent > SILENT_MS) tell(`No news for ${Math.round(silent / 1000)} s; these numbers stand still.`);
  }, 1000);
})();
