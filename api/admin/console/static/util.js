// Small helpers. Text always goes in as text: nothing that comes from an event can become markup.

const SVG = 'http://www.w3.org/2000/svg';

export const $ = (id) => document.getElementById(id);

function fill(el, props, children) {
  for (const [k, v] of Object.entries(props ?? {})) {
    if (v === undefined || v === null || v === false) continue;
    if (k.startsWith('on')) el.addEventListener(k.slice(2), v);
    else el.setAttribute(k, v === true ? '' : v);
  }
  el.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// text changes an element only if it has to: a live region is read out at every change.
export function text(el, value) {
  if (el.textContent !== value) el.textContent = value;
}

export function level(el, value) {
  if (el.dataset.level !== value) el.dataset.level = value;
}

const plain = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const few = new Intl.NumberFormat('en', { maximumFractionDigits: 1, minimumFractionDigits: 1 });

export const count = (n) => (n === null || n === undefined ? '–' : plain.format(n));

export function rate(n) {
  if (n === null || n === undefined) return '–';
  return `${n > 0 && n < 10 ? few.format(n) : plain.format(n)}/s`;
}

export function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${i > 0 && n < 100 ? few.format(n) : plain.format(n)} ${units[i]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds < 0.0095) return `${few.format(seconds * 1000)} ms`;
  if (seconds < 1) return `${plain.format(seconds * 1000)} ms`;
  if (seconds < 10) return `${few.format(seconds)} s`;
  if (seconds < 120) return `${plain.format(seconds)} s`;
  if (seconds < 7200) return `${plain.format(seconds / 60)} min`;
  if (seconds < 172800) return `${plain.format(seconds / 3600)} h`;
  return `${plain.format(seconds / 86400)} days`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

const two = (n) => String(n).padStart(2, '0');

// clock is a time with its date and zone.
export function clock(t, ms = false) {
  const d = new Date(t);
  if (Number.isNaN(d.getTime()) || d.getFullYear() < 1971) return '–';
  const east = -d.getTimezoneOffset();
  const [hours, minutes] = [Math.floor(Math.abs(east) / 60), Math.abs(east) % 60];
  const zone = `UTC${east ? `${east < 0 ? '−' : '+'}${hours}${minutes ? `:${two(minutes)}` : ''}` : ''}`;
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}${ms ? `.${String(d.getMilliseconds()).padStart(3, '0')}` : ''} ${zone}`;
}

export const short = (id) => (id.length > 16 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id);
