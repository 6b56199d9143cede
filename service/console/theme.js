// Before the first paint, so not a module. The choice is no secret: it may outlive the tab.
"use strict";
{
  const root = document.documentElement;
  const stored = (() => {
    try {
      return localStorage.getItem("foreword.theme");
    } catch {
      return null;
    }
  })();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
}
