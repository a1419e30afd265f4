// Asks before a request is aborted, and stays on the page where it was done.
"use strict";
document.addEventListener("submit", async (event) => {
  const form = event.target, name = form.dataset.request;
  if (name === undefined) return;
  event.preventDefault();
  if (!confirm(`Abort the request ${name}? A stream ends where it is; whoever waits for a whole answer gets an error.`)) return;
  form.querySelector("button").disabled = true;
  const answer = await fetch(form.action, { method: "POST", headers: { Accept: "application/json" } });
  // Where lists move by themselves, as on the dashboard, the next second shows it.
  if (!document.body.hasAttribute("sse-connect")) location.reload();
  else if (!answer.ok) form.querySelector("button").textContent = "Gone";
});
