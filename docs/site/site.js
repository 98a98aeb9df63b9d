// A table that is scrolled sideways is reached by the keyboard.
const reach = () => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (wrap.scrollWidth > wrap.clientWidth) wrap.tabIndex = 0;
    else wrap.removeAttribute("tabindex");
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
