// The theme is set before anything is painted, hence a script of its own.
(() => {
  try {
    const t = localStorage.getItem('posthaste-theme');
    if (t === 'light' || t === 'dark') document.documentElement.dataset.theme = t;
  } catch { /* no storage: the system's theme */ }
})();
