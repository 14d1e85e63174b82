// The chat page: keys in the composer, scrolling with a reply.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);

  // Composer: Enter sends, Shift+Enter inserts a line break, Esc closes the settings or stops the reply.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.id === "composer-message" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (event.target.value.trim() && find("[data-send]")) event.target.form.requestSubmit(find("[data-send]"));
    } else if (event.key === "Escape") {
      const drawer = find(".drawer[open]");
      if (drawer) {
        drawer.open = false;
        drawer.querySelector("summary").focus();
      } else {
        find("[data-stop]")?.click();
      }
    }
  });

  document.addEventListener("click", (event) => {
    for (const drawer of document.querySelectorAll(".drawer[open]")) {
      if (!drawer.contains(event.target)) drawer.open = false;
    }
  });

  // The composer is cleared when its message is sent; the text returns if the server refuses it.
  let sent = "";
  const isComposer = (event) => event.detail.ctx?.sourceElement?.id === "composer";
  document.addEventListener("htmx:before:request", (event) => {
    if (!isComposer(event)) return;
    sent = find("#composer-message").value;
    find("#composer-message").value = "";
    following = true;
  });
  const giveBack = () => {
    const field = find("#composer-message");
    if (!field.value) field.value = sent;
    field.focus();
  };
  document.addEventListener("htmx:response:error", (event) => isComposer(event) && giveBack());
  document.addEventListener("htmx:error", (event) => isComposer(event) && giveBack());

  // Keep the end of the conversation in view unless the user has scrolled away.
  let following = !find("#empty-chat");
  const scroller = find("#chat-scroll");
  if (scroller) {
    const toEnd = () => following && (scroller.scrollTop = scroller.scrollHeight);
    scroller.addEventListener("scroll", () => {
      following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
    }, { passive: true });
    new MutationObserver(toEnd).observe(scroller, { childList: true, subtree: true, characterData: true });
    new ResizeObserver(toEnd).observe(scroller);
    if (!location.hash) toEnd();
  }
})();
