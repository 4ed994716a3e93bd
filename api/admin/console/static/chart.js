// A chart of the last 15 minutes, drawn from samples of a second each.
import { h, s, clock } from './util.js';

const SPAN = 900;
const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [48, 6, 8, 20, 190];

export class Chart {
  // series: [{key, label, area}]; format turns a value into text; log: logarithmic, from 0.1 ms; none: what an empty chart says
  constructor(host, { title, series, format, log = false, none }) {
    Object.assign(this, { host, title, series, format, log, none, hover: null, width: 0 });
    this.now = h('span', { class: 'now' });
    this.keys = series.map((x, i) => h('span', { class: i ? 'key two' : 'key' }, x.label));
    this.svg = s('svg', { role: 'img', height: HEIGHT });
    host.append(h('figcaption', null, h('b', null, title), h('span', { class: 'keys' }, ...this.keys)), this.svg);
    this.svg.addEventListener('pointermove', (e) => { this.hover = e.offsetX; this.draw(); });
    this.svg.addEventListener('pointerleave', () => { this.hover = null; this.draw(); });
    new ResizeObserver(() => { if (this.width !== host.clientWidth) this.draw(); }).observe(host);
  }

  update(samples, now) {
    this.samples = samples;
    this.end = now;
    this.draw();
  }

  scale() {
    let max = 0;
    let min = Infinity;
    for (const p of this.samples) {
      for (const { key } of this.series) {
        const v = p[key];
        if (v === null || v === undefined) continue;
        max = Math.max(max, v);
        if (v > 0) min = Math.min(min, v);
      }
    }
    const plot = HEIGHT - TOP - BOTTOM;
    if (this.log) {
      const lo = Math.floor(Math.log10(Math.max(Math.min(min, 0.001), 1e-4)));
      const hi = Math.max(Math.ceil(Math.log10(Math.max(max, 0.01))), lo + 2);
      const ticks = [];
      for (let e = lo; e <= hi; e += hi - lo > 4 ? 2 : 1) ticks.push(10 ** e);
      return { y: (v) => TOP + plot * (1 - (Math.log10(Math.max(v, 10 ** lo)) - lo) / (hi - lo)), ticks };
    }
    const raw = Math.max(max, 1) / 3;
    const mag = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max([1, 2, 2.5, 5, 10].find((m) => m * mag >= raw) * mag, 1);
    const top = Math.ceil(Math.max(max, 1) / step) * step;
    const ticks = [];
    for (let v = 0; v <= top + step / 2; v += step) ticks.push(v);
    return { y: (v) => TOP + plot * (1 - v / top), ticks };
  }

  draw() {
    const width = this.host.clientWidth;
    if (!width || !this.samples) return;
    this.width = width;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    const x = (t) => LEFT + (width - LEFT - RIGHT) * (1 - (this.end - t) / SPAN);
    const base = HEIGHT - BOTTOM;
    const { y, ticks } = this.scale();
    const parts = [];
    for (const v of ticks) {
      parts.push(s('path', { class: 'grid', d: `M${LEFT} ${y(v)}H${width - RIGHT}` }), s('text', { class: 'axis', x: LEFT - 6, y: y(v) + 4, 'text-anchor': 'end' }, this.format(v)));
    }
    for (const [m, label, anchor] of [[15, '−15 min', 'start'], [width > 250 ? 10 : 7.5, width > 250 ? '−10' : '', 'middle'], [5, '−5', 'middle'], [0, 'now', 'end']]) {
      parts.push(s('text', { class: 'axis', x: x(this.end - m * 60), y: HEIGHT - 4, 'text-anchor': anchor }, label));
    }
    let any = false;
    this.series.forEach(({ key, area }, i) => {
      const { line, shape } = this.trace(key, x, y, base);
      if (!line) return;
      any = true;
      if (area) parts.push(s('path', { class: 'a1', d: shape }));
      parts.push(s('path', { class: i ? 'l2' : 'l1', d: line }));
    });
    if (!any) parts.push(s('text', { class: 'none', x: LEFT + (width - LEFT - RIGHT) / 2, y: TOP + (base - TOP) / 2 + 4 }, this.none));
    const at = this.pick(x, width);
    if (at && this.hover !== null) parts.push(s('path', { class: 'hair', d: `M${x(at.t)} ${TOP}V${base}` }));
    this.svg.replaceChildren(...parts);
    this.series.forEach(({ key, label }, i) => {
      const v = at?.[key];
      const when = i === 0 && this.hover !== null && at ? `${clock(at.t * 1000)} ` : '';
      this.keys[i].textContent = `${when}${label} ${v === null || v === undefined ? '–' : this.format(v)}`;
    });
    this.svg.setAttribute('aria-label', `${this.title}: ${this.keys.map((k) => k.textContent).join(', ')}`);
  }

  // trace makes the paths of a series. Where a value is missing for more than some seconds there is a gap.
  trace(key, x, y, base) {
    let line = '';
    let shape = '';
    let last = null;
    let first = null;
    const close = () => { if (last !== null) shape += `L${last} ${base}L${first} ${base}Z`; };
    let lastT = -Infinity;
    for (const p of this.samples) {
      const v = p[key];
      if (v === null || v === undefined || p.t < this.end - SPAN) continue;
      const px = x(p.t).toFixed(1);
      const py = y(v).toFixed(1);
      if (p.t - lastT > 8) {
        close();
        line += `M${px} ${py}h.1`;
        shape += `M${px} ${base}L${px} ${py}`;
        first = px;
      } else {
        line += `L${px} ${py}`;
        shape += `L${px} ${py}`;
      }
      last = px;
      lastT = p.t;
    }
    close();
    return { line, shape };
  }

  // pick is the sample under the pointer, or the newest.
  pick(x, width) {
    const list = this.samples;
    if (!list.length) return null;
    if (this.hover === null || this.hover < LEFT || this.hover > width - RIGHT) return list[list.length - 1];
    let best = list[0];
    for (const p of list) if (Math.abs(x(p.t) - this.hover) < Math.abs(x(best.t) - this.hover)) best = p;
    return best;
  }
}
