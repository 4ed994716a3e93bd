// The picture: writers, outbox, the two ways, Redis, groups. It is laid out in a row, or in a column when it is narrow.
import { s, count, rate, bytes, span, plural } from './util.js';

const NODES = ['writers', 'outbox', 'wal', 'sweep', 'redis', 'groups'];
const EDGES = [['writers', 'outbox'], ['outbox', 'wal'], ['wal', 'redis'], ['outbox', 'sweep'], ['sweep', 'redis'], ['redis', 'groups']];

export class Pipeline {
  constructor(host) {
    this.host = host;
    this.svg = s('svg', { role: 'img', 'aria-label': 'Pipeline' });
    host.append(this.svg);
    this.width = 0;
    new ResizeObserver(() => this.layout()).observe(host);
  }

  layout() {
    const width = Math.max(Math.round(this.host.clientWidth), 260);
    if (width === this.width) return;
    this.width = width;
    this.svg.replaceChildren();
    this.nodes = {};
    this.edges = {};
    const wide = width >= 760;
    const boxes = wide ? this.row(width) : this.column(width);
    this.height = Math.max(...Object.values(boxes).map((b) => b.y + b.h)) + 4;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${this.height}`);
    this.svg.setAttribute('height', this.height);
    for (const [a, b] of EDGES) this.edge(`${a}-${b}`, boxes[a], boxes[b], wide);
    for (const n of NODES) this.node(n, boxes[n]);
    if (this.state) this.draw(this.state);
  }

  row(width) {
    const gap = Math.min(64, width * 0.05);
    const w = (width - 4 - 4 * gap) / 5;
    const at = (i, y, hh) => ({ x: 2 + i * (w + gap), y, w, h: hh });
    return { writers: at(0, 46, 84), outbox: at(1, 46, 84), wal: at(2, 2, 80), sweep: at(2, 94, 80), redis: at(3, 46, 84), groups: at(4, 46, 84) };
  }

  column(width) {
    const gap = 26;
    const half = (width - 4 - 10) / 2;
    const full = (y) => ({ x: 2, y, w: width - 4, h: 78 });
    const step = 78 + gap;
    return {
      writers: full(2), outbox: full(2 + step), wal: { x: 2, y: 2 + 2 * step, w: half, h: 82 }, sweep: { x: 12 + half, y: 2 + 2 * step, w: half, h: 82 },
      redis: full(6 + 3 * step), groups: full(6 + 4 * step),
    };
  }

  edge(name, a, b, wide) {
    let d;
    let mid;
    if (wide) {
      const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
      const m = (x1 + x2) / 2;
      d = `M${x1} ${y1}C${m} ${y1} ${m} ${y2} ${x2} ${y2}`;
      mid = [m, (y1 + y2) / 2];
    } else {
      // In a column the two ways stand side by side; the edge leaves and enters above their middle.
      const x = Math.abs(a.w - b.w) < 1 ? a.x + a.w / 2 : a.w < b.w ? a.x + a.w / 2 : b.x + b.w / 2;
      d = `M${x} ${a.y + a.h}L${x} ${b.y}`;
      mid = [x, (a.y + a.h + b.y) / 2];
    }
    const base = s('path', { class: 'edge', d });
    const flow = s('path', { class: 'flow', d, visibility: 'hidden' });
    const [x, y] = mid;
    const cross = s('g', { visibility: 'hidden' }, s('circle', { class: 'cross', cx: x, cy: y, r: 10 }),
      s('path', { class: 'cross-x', d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }));
    this.svg.append(base, flow, cross);
    this.edges[name] = { base, flow, cross };
  }

  node(name, b) {
    const t = s('text', { class: 't', x: b.x + 16, y: b.y + 22 });
    const v = s('text', { class: 'v', x: b.x + 16, y: b.y + 47 });
    const sub = s('text', { class: 's', x: b.x + 16, y: b.y + 67 });
    const clip = `clip-${name}`;
    const g = s('g', { class: 'node', 'data-node': name, 'data-level': 'unknown' },
      s('clipPath', { id: clip }, s('rect', { x: b.x, y: b.y, width: b.w, height: b.h, rx: 10 })),
      s('rect', { x: b.x, y: b.y, width: b.w, height: b.h, rx: 10 }),
      s('rect', { class: 'strip', x: b.x, y: b.y, width: 5, height: b.h, 'clip-path': `url(#${clip})` }),
      s('g', { 'clip-path': `url(#${clip})` }, t, v, sub));
    this.svg.append(g);
    this.nodes[name] = { g, t, v, sub, w: b.w };
  }

  set(name, lvl, title, value, sub) {
    const n = this.nodes[name];
    if (n.g.dataset.level !== lvl) n.g.dataset.level = lvl;
    const put = (el, v) => {
      if (el.textContent === v) return;
      el.textContent = v;
      el.classList.remove('long');
      el.classList.toggle('long', el.getComputedTextLength() > n.w - 22); // smaller rather than cut off
    };
    put(n.t, title);
    put(n.v, value);
    put(n.sub, sub);
    this.said.push(`${title}: ${value}, ${sub}${lvl === 'bad' ? ', broken' : ''}`);
  }

  connect(name, how, perSecond) {
    const e = this.edges[name];
    e.base.setAttribute('class', how === 'cut' ? 'edge cut' : 'edge');
    e.cross.setAttribute('visibility', how === 'cut' ? 'visible' : 'hidden');
    const flowing = how === 'on' && perSecond > 0;
    e.flow.setAttribute('visibility', flowing ? 'visible' : 'hidden');
    if (!flowing) return;
    // Ten times the rate moves about twice as fast. Set only when it has changed much: a new duration restarts the dots.
    const step = Math.round(Math.log2(1 + perSecond));
    if (e.step === step) return;
    e.step = step;
    e.flow.style.animationDuration = `${Math.max(1.6 / (1 + step / 2.2), 0.22).toFixed(2)}s`;
  }

  draw(st) {
    this.state = st;
    if (!this.nodes) return;
    this.said = [];
    const pg = st.postgres;
    const p = pg.as_of ? pg.value : null;
    const parts = st.verdict.parts;
    const pgMute = Boolean(pg.error); // what it said last is not now
    const pgDown = pgMute && !pg.slow && !pg.refused;
    const word = pg.slow ? 'too slow' : pg.refused ? 'refuses' : 'no answer';
    const rdDown = Boolean(st.redis.error);
    const sample = st.sample ?? {};
    const unknown = !p && !pgMute;
    const lvl = (part) => parts[part] ?? (unknown ? 'unknown' : 'ok');
    const mode = p?.mode;
    const led = !pgMute && (p?.led ?? false);
    const active = (m) => led && mode === m;
    const out = rdDown ? 0 : sample.out;

    this.set('writers', pgDown ? 'bad' : unknown || pgMute ? 'unknown' : 'ok', 'Writers', pgDown ? 'stopped' : pgMute ? '–' : rate(sample.in),
      pgDown ? 'cannot commit' : pgMute ? 'not known' : 'events committed');
    this.set('outbox', lvl('outbox'), 'Outbox in Postgres', pgMute ? word : p ? count(p.backlog.rows) : '–',
      pgMute ? 'last known state below' : p ? (p.backlog.rows > 0 ? `${p.backlog.rows === 1 ? 'waits, for' : 'wait, the oldest'} ${span(p.backlog.oldest_seconds)}` : 'no event waits') : 'being asked');

    const path = parts.path;
    const slot = p?.slot;
    const walOn = active('cdc');
    const sweepOn = active('poll');
    const walLevel = pgDown ? 'bad' : pgMute ? 'unknown' : !walOn && path && p?.desired !== 'poll' ? path : walOn ? path ?? (rdDown ? 'unknown' : 'ok') : 'off';
    this.set('wal', walLevel, 'cdc: the WAL', pgMute ? '–' : walOn ? (rdDown ? 'waits' : 'active') : led ? 'stands by' : p ? 'no relay' : '–',
      pgMute ? 'not known' : !p ? '' : !slot.exists ? 'no slot' : slot.lost ? 'slot is lost' : walOn && st.sample?.p99 != null ? `p99 ${span(st.sample.p99)}` : `holds ${bytes(Math.max(slot.retained_bytes, 0))} of WAL`);
    const sweepLevel = pgDown ? 'bad' : pgMute ? 'unknown' : sweepOn ? (path === 'bad' ? 'bad' : rdDown ? 'unknown' : 'ok') : p && !led ? path ?? 'bad' : 'off';
    this.set('sweep', sweepLevel, 'poll: the table', pgMute ? '–' : sweepOn ? (rdDown ? 'waits' : 'active') : led ? 'stands by' : p ? 'no relay' : '–',
      pgMute ? 'not known' : !p ? '' : sweepOn && st.sample?.p99 != null ? `p99 ${span(st.sample.p99)}` : sweepOn ? 'the table, in order' : 'steps in on failure');

    const r = st.redis.as_of ? st.redis.value : null;
    this.set('redis', parts.redis ?? (r ? 'ok' : 'unknown'), 'Redis streams', rdDown ? 'down' : r ? rate(sample.out) : '–',
      rdDown ? 'takes no events' : r ? `${bytes(r.used_bytes)}${r.max_bytes ? ` of ${bytes(r.max_bytes)}` : ' used'}` : 'being asked');

    const { groups: n, unread, pending } = st.group_sum;
    const asked = Boolean(st.groups.as_of);
    this.set('groups', rdDown || !asked ? 'unknown' : parts.groups ?? (n ? 'ok' : 'off'), !asked ? 'Consumer groups' : plural(n, 'consumer group'),
      rdDown || !asked ? '–' : n ? `${count(unread)} unread` : 'none', rdDown ? 'not known' : !asked ? 'being asked' : n ? `${count(pending)} not acknowledged` : 'no reader yet');

    this.connect('writers-outbox', pgDown ? 'cut' : 'on', sample.in ?? 0);
    for (const [way, on] of [['wal', walOn], ['sweep', sweepOn]]) {
      this.connect(`outbox-${way}`, pgDown ? 'cut' : on ? 'on' : 'off', out ?? 0);
      this.connect(`${way}-redis`, rdDown && (on || !led) ? 'cut' : on ? 'on' : 'off', out ?? 0);
    }
    if (p && !led && !pgMute) {
      this.connect('outbox-wal', 'cut', 0);
      this.connect('outbox-sweep', 'cut', 0);
    }
    this.connect('redis-groups', rdDown ? 'cut' : n ? 'on' : 'off', out ?? 0);
    this.svg.setAttribute('aria-label', `Pipeline. ${this.said.join('. ')}.`);
  }
}
