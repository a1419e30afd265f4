// Copies a key that was just made. Everything else on the page works without a script.
"use strict";
(() => {
  const secret = document.getElementById("secret");
  const button = document.getElementById("copy");
  if (!secret) return;
  secret.select();
  button.hidden = false;
  button.addEventListener("click", async () => {
    secret.select();
    try {
      await navigator.clipboard.writeText(secret.value);
      button.textContent = "Copied";
    } catch {
      // Browsers give the clipboard to pages from https and from this machine only; it is selected, ready for the keys.
      button.textContent = "Press Ctrl+C";
    }
  });
  // Going back or loading again must not send the form once more.
  history.replaceState(null, "", "/admin/keys");
})();
