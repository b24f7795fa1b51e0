// @ts-check
/** How what we add to the page looks; nothing of the editor's own is changed but the breaking of our status's words. */

export const STYLE = `
.dom-widget[data-onediff="status"] { cursor: pointer; }
.dom-widget[data-onediff="status"] .break-all { word-break: normal; overflow-wrap: anywhere; }
.onediff-dialog { max-width: 60rem; padding: 1rem; border-radius: 8px; border: 1px solid var(--border-color, #444);
  background: var(--comfy-menu-bg, #222); color: var(--fg-color, #ddd); }
.onediff-dialog pre { white-space: pre-wrap; overflow-wrap: anywhere; user-select: text; max-height: 60vh;
  overflow: auto; margin: 0.5rem 0 1rem; }
.onediff-dialog button, .onediff-panel button { margin-right: 0.5rem; padding: 0.25rem 0.75rem; border-radius: 6px;
  border: 1px solid var(--border-color, #444); background: var(--comfy-input-bg, #333);
  color: var(--input-text, #ddd); cursor: pointer; }
.onediff-panel { padding: 0.75rem; font-size: 0.8rem; color: var(--fg-color, #ddd); overflow: auto; height: 100%; }
.onediff-panel header { display: flex; flex-direction: column; gap: 0.2rem; margin-bottom: 0.6rem; }
.onediff-panel header strong { font-size: 1rem; }
.onediff-panel small { opacity: 0.7; overflow-wrap: anywhere; }
.onediff-panel nav { display: flex; flex-wrap: wrap; gap: 0.3rem 0; margin-bottom: 0.6rem; }
.onediff-panel h4 { margin: 0.8rem 0 0.3rem; font-weight: 600; }
.onediff-panel article { display: flex; flex-direction: column; align-items: flex-start; gap: 0.2rem;
  padding: 0.4rem; margin-bottom: 0.4rem; border-radius: 6px; background: var(--comfy-input-bg, #2a2a2a); }
.onediff-panel p { margin: 0.2rem 0; overflow-wrap: anywhere; }
`;
