// Says so at the top of the page when the server does not answer; its next answer puts things right.
"use strict";
(() => {
  const state = document.getElementById("state");

  function tell() {
    const word = state.querySelector(".word");
    if (!word) return;
    word.className = "word bad";
    word.lastChild.textContent = "unreachable";
    const reason = document.createElement("span");
    reason.className = "reason";
    reason.textContent = "The server does not answer; it is asked again and again.";
    state.replaceChildren(word, reason);
  }

  // A stream that broke off, a server that is not there, one that takes too long.
  document.body.addEventListener("htmx:sseError", tell);
  for (const fault of ["htmx:sendError", "htmx:timeout"]) {
    document.body.addEventListener(fault, ({ detail }) => { if (detail.elt === state) tell(); });
  }
})();
