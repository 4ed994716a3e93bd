// The console: the state that the process reports every second is drawn, what is pressed is asked about and sent.
import { $, h, text, level, count, rate, bytes, span, clock, short, plural } from './util.js';
import { Pipeline } from './pipeline.js';
import { Chart } from './chart.js';

const KEEP = 50; // events kept of a stream, and shown
const RING = 900; // samples kept
const EVERY = 1000; // ms from one request of the state to the next
const SILENT = 5000; // ms without an answer until the connection counts as lost; one takes two while a server hangs

let session = null;
let state = null;
let samples = [];
let events = [];
let paused = false;
const since = () => ({ wall: Date.now(), tick: performance.now() });
// A clock that is set back must not make old news new, and the other one stands still while the machine sleeps.
const ago = (t) => Math.max(Date.now() - t.wall, performance.now() - t.tick);
let heard = null; // when the process last answered
let awaited = null; // since when an answer is awaited; null if none is
const opened = since();
let lostSince = null;
let token = null;
try { token = sessionStorage.getItem('posthaste-token'); } catch { /* kept in memory only */ }

// ---- talking to the process

class CallError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const authorized = () => (token ? { Authorization: `Bearer ${token}` } : {});

async function call(method, path, body) {
  const headers = authorized();
  if (method !== 'GET') {
    headers['Content-Type'] = 'application/json';
    headers['X-Posthaste-Csrf'] = session?.csrf ?? '';
  }
  let resp;
  try {
    resp = await fetch(`api/${path}`, { method, headers, body: body && JSON.stringify(body), signal: AbortSignal.timeout(12000) });
  } catch {
    throw new CallError(0, 'This process does not answer.');
  }
  const answer = await resp.json().catch(() => ({}));
  if (!resp.ok) throw new CallError(resp.status, answer.detail ?? `Status ${resp.status}`);
  return answer;
}

// change is a call that changes something. A process that was restarted has another token of its own: get it and try again.
async function change(method, path, body) {
  try {
    return await call(method, path, body);
  } catch (e) {
    if (e.status !== 403) throw e;
    await loadSession();
    return call(method, path, body);
  }
}

// needToken asks for the token without which there is nothing to see, once.
function needToken() {
  locked = true;
  if (declined || $('ask').open) return;
  declined = true;
  ask({
    title: 'This console needs the admin token', yes: 'Open', token: true,
    body: [h('p', null, 'It is the value of POSTHASTE_ADMIN_TOKEN of this process. A read token shows everything and changes nothing.')],
    act: async () => { await loadSession(); declined = false; start(); },
  });
}

async function loadSession() {
  session = await call('GET', 'session');
  const facts = [['relay', session.relay], ['source', session.source], ['this process', `${session.kind} ${session.holder}`], ['version', session.version]];
  $('process').replaceChildren(...facts.map(([k, v]) => h('span', null, `${k} `, h('b', null, v))));
  document.title = `posthaste · ${session.relay}`;
}

async function loadHistory() {
  const all = await call('GET', 'history');
  samples = all.samples;
  drawCharts();
}

// ---- the live connection

let locked = false; // this process wants a token that we have not
let declined = false;

// poll requests the state every second until the token is missing. While the page is hidden it requests nothing.
async function poll() {
  if (document.visibilityState !== 'visible') {
    document.addEventListener('visibilitychange', poll, { once: true });
    return;
  }
  const began = performance.now();
  awaited ??= since();
  try {
    const st = await call('GET', 'state');
    alive();
    queueMicrotask(() => onState(st)); // a fault in drawing must show as one, rather than end the polls
  } catch (e) {
    if (e.status === 401) {
      needToken();
      return;
    }
  }
  setTimeout(poll, Math.max(50, EVERY - (performance.now() - began)));
}

function alive() {
  heard = since();
  awaited = null;
  locked = false;
  if (lostSince === null) return;
  lostSince = null;
  document.body.classList.remove('stale');
  // Perhaps it is another process by now.
  loadSession().then(loadHistory).catch(() => {});
}

function watchConnection() {
  const pill = $('connection');
  if (!locked && (!awaited || ago(awaited) <= SILENT)) {
    if (!heard) return;
    level(pill, 'ok');
    text(pill, 'live');
    return;
  }
  if (lostSince === null) {
    lostSince = (heard ?? opened).wall;
    document.body.classList.add('stale');
  }
  if (locked) {
    level(pill, 'warn');
    text(pill, 'the admin token is missing');
    return;
  }
  level(pill, 'bad');
  text(pill, heard ? `lost since ${clock(lostSince)}` : 'not connected');
  drawVerdict({
    level: 'bad', title: `Connection to this process lost${heard ? ` since ${clock(lostSince)}` : ''}`, parts: {}, also: [], action: '', runbook: '',
    why: `What you see below is ${heard ? `from ${clock(lostSince)}` : 'empty'}. Events may well be flowing: another process' console, or posthaste status, tells.`,
    remedy: 'Check that the process is running and reachable. This page reconnects automatically.',
  });
}

// ---- drawing

// runbook is a link to the section about a problem.
const runbook = (p) => (p.runbook ? ['Runbook: ', h('a', { href: `runbook#${p.runbook.toLowerCase()}`, target: '_blank' }, p.runbook)] : []);

const MARKS = { ok: '✓', warn: '!', bad: '✕', unknown: '…' };
const ACTIONS = { dead: 'See dead events', doctor: 'Ask the doctor', groups: 'See groups', mode: 'Choose the mode' };

function drawVerdict(v) {
  level($('verdict'), v.level);
  text($('verdict-mark'), MARKS[v.level]);
  text($('verdict-title'), v.title);
  text($('verdict-why'), v.why);
  text($('verdict-remedy'), v.remedy);
  $('verdict-remedy').hidden = !v.remedy;
  if ($('verdict-runbook').textContent !== `Runbook: ${v.runbook}`) $('verdict-runbook').replaceChildren(...runbook(v));
  $('verdict-runbook').hidden = !v.runbook;
  const a = $('verdict-action');
  a.hidden = !v.action;
  if (v.action) {
    if (a.getAttribute('href') !== `#${v.action}`) a.setAttribute('href', `#${v.action}`);
    text(a, ACTIONS[v.action]);
  }
  const also = $('verdict-also');
  const key = JSON.stringify(v.also);
  if (also.dataset.key !== key) {
    also.dataset.key = key;
    also.replaceChildren(...v.also.map((p) => h('li', { 'data-level': p.level }, h('b', null, p.title), ` ${p.why} ${p.remedy} `, runbook(p))));
    also.hidden = v.also.length === 0;
  }
  const badge = { bad: '✕ ', warn: '! ' }[v.level] ?? '';
  if (session) document.title = `${badge}posthaste · ${session.relay}`;
}

const pipeline = new Pipeline($('pipeline'));

const charts = [
  new Chart($('chart-latency'), {
    title: 'Commit to publish', log: true, format: span, series: [{ key: 'p50', label: 'p50' }, { key: 'p99', label: 'p99' }],
    none: 'Measured by the relay',
  }),
  new Chart($('chart-backlog'), { title: 'Backlog', format: count, series: [{ key: 'backlog', label: 'events', area: true }], none: 'Recorded while a page is open' }),
  new Chart($('chart-rate'), { title: 'Events per second', format: count, series: [{ key: 'out', label: 'published', area: true }, { key: 'in', label: 'written' }], none: 'Nothing yet' }),
];

function drawCharts() {
  const now = samples.length ? samples[samples.length - 1].t : Date.now() / 1000;
  for (const c of charts) c.update(samples, now);
}

const silence = (look) => (look.slow ? 'is too slow' : look.refused ? 'refuses' : 'does not answer');

function drawSources(st) {
  const one = (name, look) => {
    if (look.error) return h('span', { 'data-level': 'bad' }, `${name} ${silence(look)} since ${clock(look.since)}${look.as_of ? `, last did ${clock(look.as_of)}` : ''}`);
    if (!look.as_of) return h('span', null, `${name} is being asked`);
    const age = (Date.parse(st.now) - Date.parse(look.as_of)) / 1000;
    return h('span', { 'data-level': age > 10 ? 'bad' : 'ok' }, age > 3 ? `${name} as of ${clock(look.as_of)}` : `${name} answers`);
  };
  const box = h('p', null, one('Postgres', st.postgres), one('Redis', st.redis));
  if ($('sources').textContent !== box.textContent) $('sources').replaceChildren(...box.childNodes);
}

// repairRow says what a relay publishes again, or has published again, because Redis or Postgres had forgotten it.
function repairRow(r) {
  if (!r.done_at) return ['Restoring', `${r.stream}: ${count(r.restored)} so far${r.expected ? `, about ${count(r.expected)} to compare` : ''}, since ${clock(r.noticed_at)}`];
  const found = [`${plural(r.restored, 'event')} of ${r.stream}`];
  if (r.recalled) found.push(`${count(r.recalled)} found there, and not published again`);
  if (r.phantoms) found.push(plural(r.phantoms, 'phantom'));
  return ['Restored', `${found.join(', ')}, at ${clock(r.done_at)}`];
}

function drawMode(st) {
  const known = st.postgres.as_of;
  const p = st.postgres.value;
  for (const b of $('switch').children) b.setAttribute('aria-pressed', String(Boolean(known) && b.dataset.mode === p.desired));
  const rows = [];
  if (known) {
    rows.push(['Active', p.mode === 'standby' ? (p.owner ? 'none: a relay takes over' : 'none: no relay has led yet') : `${p.mode} since ${clock(p.changed_at)}`]);
    if (st.postgres.error) rows.unshift(['As of', `${clock(known)}; Postgres ${silence(st.postgres)}`]);
    if (p.degraded) rows.push(['Because', p.degraded]);
    rows.push(['Leader', p.led ? p.owner : p.owner ? `none; ${p.owner} led last` : 'none']);
    rows.push(['Relays', `${p.relays ? `${count(p.relays)} connected` : p.led ? 'not visible to this process’ role' : 'none connected'}, epoch ${p.epoch}`]);
    const slot = p.slot;
    rows.push(['Slot', !slot.exists ? 'none' : slot.lost ? `lost (${slot.reason})` : `${slot.active ? 'streaming' : 'idle'}, ${bytes(Math.max(slot.confirmed_lag_bytes, 0))} behind, holds ${bytes(Math.max(slot.retained_bytes, 0))}`]);
    for (const r of (p.reconciled ?? []).filter((r) => !r.done_at || r.restored + r.recalled + r.phantoms).slice(0, 5)) rows.push(repairRow(r));
    if (p.phantoms) rows.push(['Phantoms', `${count(p.phantoms)}: posthaste phantoms`]);
    rows.push(['Hand-over', p.handover_lsn === '0/0' ? 'none yet' : `at ${p.handover_lsn}`]);
  } else {
    rows.push(['Active', st.postgres.error ? `unknown: Postgres ${silence(st.postgres)}` : 'being asked']);
  }
  if (st.relay) rows.push(['This relay', `${st.relay.leader ? 'leads' : 'stands by'}, ${st.relay.phase}, ${plural(st.relay.inflight, 'event')} in flight`]);
  const box = h('dl', null, rows.map(([k, v]) => [h('dt', null, k), h('dd', null, v)]));
  if ($('mode-rows').textContent !== box.textContent) $('mode-rows').replaceChildren(...box.childNodes);
}

// ---- the hand-over, as it happens

let handover = null;

// follow begins to watch a switch to a mode, whoever made it.
function follow(to, p) {
  handover = { to, at: Date.now(), epoch: p.epoch, lsn: p.handover_lsn, from: p.mode, done: {}, ended: false };
  $('handover').hidden = false;
}

function drawHandover(st) {
  if (!st.postgres.as_of) return;
  const p = st.postgres.value;
  if (drawHandover.desired && drawHandover.desired !== p.desired && handover?.to !== p.desired) follow(p.desired, { ...p, mode: drawHandover.mode, handover_lsn: drawHandover.lsn });
  Object.assign(drawHandover, { desired: p.desired, mode: p.mode, lsn: p.handover_lsn });
  if (!handover || handover.ended) return; // what becomes of the mode after a switch is not part of it
  const stream = handover.to !== 'poll';
  const target = stream ? 'cdc' : 'poll';
  const same = handover.from === target;
  const arrived = p.desired === handover.to && p.mode === target && (!stream || p.slot.active);
  const steps = stream
    ? [
        ['asked', `${handover.to} is recorded in Postgres`, p.desired === handover.to],
        ['sweep', `poll empties the outbox${p.mode === 'poll' ? ` (${plural(p.backlog.rows, 'event')} left)` : ''}`, arrived || p.handover_lsn !== handover.lsn],
        ['lsn', `Hand-over at ${p.handover_lsn === handover.lsn && !arrived ? 'the position to come' : p.handover_lsn}`, arrived || p.handover_lsn !== handover.lsn],
        ['stream', 'The slot streams', arrived],
      ]
    : [
        ['asked', 'poll is recorded in Postgres', p.desired === 'poll'],
        ['stop', 'cdc settles what is in flight and stops', p.mode === 'poll' || !p.slot.active],
        ['poll', 'Every relay polls', arrived],
      ];
  const now = Date.now();
  let current = true;
  const items = steps.map(([key, words, done]) => {
    if (done && !handover.done[key]) handover.done[key] = now - handover.at;
    const how = done ? 'done' : current ? 'now' : 'later';
    if (!done) current = false;
    return h('li', { 'data-step': how }, h('span', null, words), h('span', { class: 'muted' }, done && !same ? `+${span(handover.done[key] / 1000)}` : ''));
  });
  if (!arrived && p.degraded) items.push(h('li', null, h('span', { class: 'note' }, p.degraded)));
  text($('handover-title'), arrived ? (same ? `Already in ${target}: nothing to hand over` : `Switched to ${handover.to} in ${span(Math.max(...Object.values(handover.done)) / 1000)}`) : `Switching to ${handover.to} since ${clock(handover.at)}`);
  $('handover-steps').replaceChildren(...items);
  handover.ended = arrived;
}

// ---- tables

const td = (label, props, ...c) => h('td', { 'data-label': label, ...props }, ...c);

function table(cls, heads, rows) {
  return h('div', { class: 'scroll' }, h('table', { class: `cards ${cls}` }, h('thead', null, h('tr', null, heads.map(([name, num]) => h('th', { scope: 'col', class: num ? 'num' : null }, name)))), h('tbody', null, rows)));
}

const empty = (strong, rest) => h('p', { class: 'empty' }, h('b', null, strong), ' ', rest);

function drawEvents() {
  if (paused) return;
  if (events.length === 0) {
    $('events-body').replaceChildren(empty('No event yet.', 'As soon as something is published it appears here, newest first.'));
    return;
  }
  const rows = events.filter((e) => shown(baseOf(e.stream))).map((e) =>
    h('tr', { class: e.fresh ? 'new' : null },
      td('Time', null, clock(e.time, true)), td('Type', { class: 'text' }, e.type, e.replayed ? ' (replayed)' : ''), td('Subject', { class: 'id' }, h('button', { type: 'button', class: 'link', onclick: () => trace(e.subject) }, e.subject)),
      td('Stream', { class: 'text' }, e.stream), td('Entry', { class: 'id' }, e.entry_id)));
  for (const e of events) e.fresh = false;
  $('events-body').replaceChildren(table('events', [['Time'], ['Type'], ['Subject'], ['Stream'], ['Entry']], rows));
}

// onEvents adds the events that the page does not have yet.
function onEvents(list) {
  const name = (e) => `${e.entry_id} ${e.stream}`;
  const have = new Set(events.map(name));
  const more = list.filter((e) => !have.has(name(e)));
  if (more.length === 0) return;
  const fresh = events.length > 0;
  for (const e of more) events.unshift({ ...e, fresh });
  const kept = {};
  events = events.filter((e) => { kept[e.stream] = (kept[e.stream] ?? 0) + 1; return kept[e.stream] <= KEEP; }).slice(0, 20 * KEEP);
  drawEvents();
}

const unfolded = new Set(); // rows whose parts are shown

// foldButton shows and hides the parts of a row.
function foldButton(key, label, words) {
  return h('button', { type: 'button', class: 'link', 'data-fold': key, 'aria-expanded': String(unfolded.has(key)), 'aria-label': label, onclick: () => {
    if (!unfolded.delete(key)) unfolded.add(key);
    drawStreams(state);
    drawGroups(state);
    drawDead();
  } }, words);
}

// fill redraws the body of a section if key has changed, unless the last draw was of the same. The keyboard stays where it is.
function fill(body, key, draw) {
  const now = JSON.stringify([key, [...unfolded], type]);
  if (body.dataset.key === now) return;
  body.dataset.key = now;
  const focused = document.activeElement?.dataset.fold;
  body.replaceChildren(...draw());
  if (focused && body.querySelector('[data-fold]')) [...body.querySelectorAll('[data-fold]')].find((b) => b.dataset.fold === focused)?.focus();
}

// oldFigures says from when figures of Redis are; '' while it answers.
const oldFigures = (look) => (stale() ? h('p', { class: 'muted' }, `Not known: Redis ${silence(state.redis)}. These are the figures of ${clock(look.as_of)}.`) : '');

// ---- types and streams

let type = ''; // the stream of the type that is shown alone; '' for all

const shown = (base) => !type || base === type;
const baseOf = (stream) => state?.streams.value.find((x) => x.stream === stream)?.base ?? stream;
const bases = (st) => [...new Set(st.streams.value.map((x) => x.base))].sort();

function drawTypes(st) {
  const all = bases(st);
  if ($('type').dataset.key === String(all)) return;
  $('type').dataset.key = String(all);
  if (type && !all.includes(type)) all.push(type);
  $('type').replaceChildren(h('option', { value: '' }, 'all'), ...all.map((b) => h('option', { value: b, selected: b === type }, b)));
  $('filter').hidden = all.length < 2;
}

$('type').addEventListener('change', (e) => {
  type = e.target.value;
  drawStreams(state);
  drawGroups(state);
  drawDead();
  drawEvents();
});

const seen = []; // of the last seconds: when the streams were read, and how many entries each had got by then

// streamRates are the entries added to each stream per second.
function streamRates(look) {
  const at = Date.parse(look.as_of);
  if (seen.at(-1)?.at !== at) seen.push({ at, added: new Map(look.value.map((x) => [x.stream, x.added])) });
  while (seen.length > 2 && at - seen[0].at > 10000) seen.shift();
  return (x) => {
    const first = seen[0].added.get(x.stream) ?? -1;
    return first < 0 || x.added < first || at === seen[0].at ? null : (1000 * (x.added - first)) / (at - seen[0].at);
  };
}

const sum = (list, f) => list.reduce((n, x) => { const v = f(x); return n === null || v === null || v < 0 ? null : n + v; }, 0);

function drawStreams(st) {
  const look = st.streams;
  const rateOf = look.as_of ? streamRates(look) : () => null;
  const wrong = look.value.filter((x) => x.length < 0).map((x) => x.stream);
  const row = (name, list, props) => {
    const groups = new Set(st.groups.value.filter((g) => g.stream === list[0].base).map((g) => g.group));
    const bytesOf = sum(list, (x) => x.memory);
    return h('tr', props, td('Stream', { class: 'text' }, name), td('Length', { class: 'num' }, count(sum(list, (x) => x.length))),
      td('Rate', { class: 'num' }, stale() ? 'not known' : rate(sum(list, rateOf))), td('Memory', { class: 'num' }, bytesOf === null ? '–' : bytes(bytesOf)),
      td('Groups', { class: 'text' }, !st.groups.as_of ? 'not known' : [...groups].slice(0, 5).join(', ') || 'none', groups.size > 5 ? `, ${count(groups.size - 5)} more` : ''));
  };
  fill($('streams-body'), [look.value, look.value.map((x) => rate(rateOf(x))), st.groups.value.map((g) => [g.stream, g.group]), st.redis.error, look.error, Boolean(look.as_of)], () => {
    if (look.value.length === 0) return [!look.as_of ? empty('Not known.', look.error || 'Postgres names the streams, then Redis is asked.') : empty('No stream yet.', 'The first event of a type makes its stream.')];
    return [h('div', { class: stale() ? 'unknown' : null }, oldFigures(look), table('streams', [['Stream'], ['Length', 1], ['Rate', 1], ['Memory', 1], ['Groups']], bases(st).filter(shown).map((base) => {
      const list = look.value.filter((x) => x.base === base);
      if (list.length === 1) return row(list[0].stream, list);
      const key = JSON.stringify([base]);
      return [row(foldButton(key, `the streams of ${base}`, `${base} (${plural(list.length, 'stream')})`), list), unfolded.has(key) ? list.map((x) => row(x.stream, [x], { class: 'sub' })) : []];
    }).flat(2))),
    wrong.length ? h('p', { class: 'error' }, `Not a stream: ${wrong.join(', ')}. Redis refuses the events of these keys.`) : '',
    st.postgres.value.streams > look.value.length ? h('p', { class: 'muted' }, `${count(st.postgres.value.streams)} in all; ${look.value.length} are shown.`) : ''];
  });
}

// ---- consumer groups

// stale reports that Redis does not answer: its last figures are not those of now.
const stale = () => Boolean(state.redis.error);

const groupLevel = (g) => (stale() ? 'unknown' : g.lost > 0 ? 'bad' : g.abandoned || ((g.idle_seconds >= 60 || g.waits_seconds >= 300) && (g.lag !== 0 || g.pending > 0)) ? 'warn' : 'ok');

// groupRow is the row of a group, or of what it is on one of several streams of a type, which is beneath it.
function groupRow(g, stream, props, name = g.group) {
  const lvl = groupLevel(g);
  const what = lvl === 'unknown' ? 'not known' : g.lost > 0 ? `lost ${count(g.lost)}` : g.abandoned ? 'abandoned' : lvl === 'warn' ? 'behind' : 'reads';
  return h('tr', props,
    td('Group', { class: 'text' }, name), td('Stream', { class: 'text' }, stream), td('State', null, h('span', { class: 'tag', 'data-level': lvl }, what)),
    td('Unread', { class: 'num' }, g.lag < 0 ? 'unknown' : count(g.lag)), td('Not acked', { class: 'num' }, count(g.pending)),
    td('Oldest not acked', { class: 'num' }, g.pending ? span(g.oldest_pending_seconds) : '–'), td('Waits for', { class: 'num' }, g.waits_seconds > 0 ? span(g.waits_seconds) : '–'), td('Consumers', { class: 'num' }, count(g.consumers)));
}

// groupRows are the row of a group and, if they are unfolded, what it is on each stream of its type.
function groupRows(g) {
  if (!g.streams) return groupRow(g, g.stream);
  const key = JSON.stringify([g.stream, g.group]);
  const open = unfolded.has(key);
  const fold = foldButton(key, `${g.group} on the streams of ${g.stream}`, `${g.stream} (${plural(g.streams.length, 'stream')})`);
  const own = [...g.streams].sort((a, b) => a.stream.length - b.stream.length || (a.stream < b.stream ? -1 : 1));
  return [groupRow(g, fold), open ? own.map((on) => groupRow(on, on.stream, { class: 'sub' }, '')) : []];
}

function drawGroups(st) {
  const look = st.groups;
  const list = look.value.filter((g) => shown(g.stream)); // the gravest first
  fill($('groups-body'), [list, look.error, st.redis.error, Boolean(look.as_of)], () => {
    if (list.length === 0) return [look.error || stale() ? empty('Not known.', look.error || st.redis.error)
      : !look.as_of ? empty('Not known yet.', 'Postgres names the streams, then Redis is asked.') : empty('No consumer group reads a stream.', 'posthaste consume --group NAME starts one.')];
    return [h('div', { class: stale() ? 'unknown' : null }, oldFigures(look),
      table('groups', [['Group'], ['Stream'], ['State'], ['Unread', 1], ['Not acked', 1], ['Oldest not acked', 1], ['Waits for', 1], ['Consumers', 1]], list.flatMap(groupRows))),
    st.group_sum.groups > look.value.length ? h('p', { class: 'muted' }, `${count(st.group_sum.groups)} in all; the ${look.value.length} gravest are shown. posthaste groups list shows all.`) : '',
    look.error && !stale() ? h('p', { class: 'error' }, `As of ${clock(look.as_of)}, and perhaps not all: ${look.error}`) : ''];
  });
}

// ---- dead events

let dead = null;
let deadKey = '';

async function loadDead(fresh) {
  try {
    dead = await call('GET', fresh ? 'dead?fresh=1' : 'dead');
  } catch (e) {
    dead = { dead: [], total: 0, error: e.message };
    deadKey = ''; // ask again with the next state
  }
  drawDead();
}

// An entry without an id, which some consumer could not make an event of, cannot be named.
const nameless = (d) => /^[0-]*$/.test(d.id);
const retryable = (d) => !d.retrying && !nameless(d);

// causes are the dead events, by their source and reason. Reasons that differ in ids and long numbers alone are the same.
function causes(list) {
  const all = new Map();
  for (const d of list) {
    const key = JSON.stringify([d.source, d.class, d.error.replace(/[0-9a-f]{8}-[0-9a-f-]{27}|\d{6,}/gi, '#')]);
    all.set(key, [...(all.get(key) ?? []), d]);
  }
  return [...all];
}

const PARTS = 20; // events of a cause that are shown one by one

function drawDead() {
  const list = dead?.dead.filter((d) => shown(session?.prefix + d.aggregate_type));
  if (!list) return;
  fill($('dead-body'), [list, dead.error, dead.total], () => {
    if (list.length === 0) return [dead.error ? empty('Not known.', dead.error) : empty('None.', 'Events that Redis refuses, and those that a consumer group gives up, are kept here and can be retried.')];
    return [table('dead', [['Events'], ['Of'], ['By'], ['Why'], ['Since'], ['']], causes(list).map(([key, all]) => (all.length === 1 ? deadRow(all[0]) : causeRows(key, all))).flat()),
      dead.total > dead.dead.length ? h('p', { class: 'muted' }, `${count(dead.total)} in all; the oldest ${count(dead.dead.length)} are shown. posthaste dead retry --all retries all.`) : '',
      dead.error ? h('p', { class: 'error' }, `Not all are known: ${dead.error}`) : ''];
  });
}

// causeRows are the row of several events with one cause and, if it is unfolded, the first of them.
function causeRows(key, all) {
  const open = all.filter(retryable);
  const types = [...new Set(all.map((d) => d.aggregate_type))];
  const words = plural(all.length, 'event');
  return [h('tr', null,
    td('Events', { class: 'text' }, foldButton(key, `the ${words} that are dead for: ${all[0].error}`, words)), td('Of', { class: 'text' }, types.slice(0, 5).join(', ')), td('By', null, all[0].source),
    td('Why', { class: 'text' }, all[0].error), td('Since', null, clock(all[0].dead_at)),
    td('', { class: 'actions' }, open.length === 0 ? h('span', { class: 'tag', 'data-level': 'unknown' }, all.some((d) => d.retrying) ? 'on their way' : 'no ids') : [
      h('button', { type: 'button', class: 'small', 'aria-label': `Retry all ${words}`, onclick: () => retryDead(open) }, 'Retry all'),
      h('button', { type: 'button', class: 'small quiet', 'aria-label': `Drop all ${words}`, onclick: () => dropDead(open) }, 'Drop all')])),
  unfolded.has(key) ? all.slice(0, PARTS).map((d) => deadRow(d, { class: 'sub' })) : []].flat();
}

function deadRow(d, props) {
  const name = `${d.type || 'event'} ${short(d.id)}`;
  return h('tr', props,
    td('Events', { class: 'text' }, h('div', null, d.type || '(malformed)', h('br'), nameless(d) ? 'without an id' : h('button', { type: 'button', class: 'link', onclick: () => trace(d.id) }, d.id))),
    td('Of', { class: 'text' }, `${d.aggregate_type}/${d.aggregate_id}`), td('By', null, d.source), td('Why', { class: 'text' }, `${d.error} (${plural(d.attempts, 'attempt')})`), td('Since', null, clock(d.dead_at)),
    td('', { class: 'actions' }, d.retrying ? h('span', { class: 'tag', 'data-level': 'unknown' }, 'on its way') : nameless(d) ? h('span', { class: 'muted' }, 'posthaste dead drop --all') : [
      h('button', { type: 'button', class: 'small', 'aria-label': `Retry ${name}`, onclick: () => retryDead([d]) }, 'Retry'),
      h('button', { type: 'button', class: 'small quiet', 'aria-label': `Drop ${name}`, onclick: () => dropDead([d]) }, 'Drop')]));
}

const AT_ONCE = 200; // ids in a call

// onDead calls an action with the ids of events, and reports those that it failed for.
async function onDead(action, list) {
  const ids = [...new Set(list.map((d) => d.id))];
  const results = [];
  try {
    for (let i = 0; i < ids.length; i += AT_ONCE) {
      results.push(...(await change('POST', `dead/${action}`, { ids: ids.slice(i, i + AT_ONCE), source: list[0].source })).results);
      if (ids.length > AT_ONCE) text($('ask-yes'), `${count(results.length)} of ${count(ids.length)}`);
    }
  } finally {
    await loadDead(true);
  }
  const failed = results.filter((r) => r.error);
  if (failed.length) throw new CallError(0, `${failed.slice(0, 5).map((r) => `${r.what}: ${r.error}`).join('; ')}${failed.length > 5 ? `; ${plural(failed.length - 5, 'more failure')}` : ''}`);
  if (results.length === 0) throw new CallError(0, 'Nothing is stored under this id any more.');
}

function retryDead(list) {
  ask({
    title: list.length === 1 ? 'Retry this event?' : `Retry ${plural(list.length, 'event')}?`, yes: 'Retry',
    body: [h('p', null, 'An event that Redis refused goes back into the outbox, behind everything in it; one that a group gave up goes back to that group. If the cause remains, it will be dead again.')],
    act: () => onDead('retry', list),
  });
}

function dropDead(list) {
  const [d] = list;
  const one = list.length === 1;
  ask({
    title: one ? 'Drop this event for good?' : `Drop ${plural(list.length, 'event')} for good?`, yes: one ? 'Drop it' : 'Drop all', danger: true,
    body: [h('p', null, `${one ? `${d.type} of ${d.aggregate_type}/${d.aggregate_id}` : 'These events'} will never be ${d.source === 'relay' ? 'published' : `processed by group ${d.source}`}. This cannot be undone.`),
      h('p', { class: 'mono' }, one ? d.id : `Cause: ${d.error}`)],
    act: () => onDead('drop', list),
  });
}

// ---- who changed what

const OUTCOMES = { ok: 'ok', begun: 'unknown', refused: 'warn', failed: 'bad' };

// details are the arguments and results of a change, with the first three of each list.
function details(all) {
  const list = (k, v) => {
    const more = v.length - 3 + (all[`${k}_more`] ?? 0);
    return v.slice(0, 3).join(', ') + (more > 0 ? ` and ${count(more)} more` : '');
  };
  return Object.entries(all).filter(([k]) => !k.endsWith('_more')).map(([k, v]) => `${k} ${Array.isArray(v) ? list(k, v) : v}`).join('; ');
}

async function loadAudit() {
  let entries;
  try {
    ({ entries } = await call('GET', 'audit'));
  } catch (e) {
    $('audit-body').replaceChildren(empty('Not known.', e.message));
    return;
  }
  if (entries.length === 0) {
    $('audit-body').replaceChildren(empty('Nothing.', 'Each change that an operator makes is shown here, and what was refused.'));
    return;
  }
  const rows = entries.map((a) => h('tr', null,
    td('When', null, clock(a.at)), td('Who', { class: 'text' }, a.actor), td('From', { class: 'text' }, a.source), td('What', { class: 'text' }, a.action),
    td('Outcome', { class: 'text' }, h('span', null, h('span', { class: 'tag', 'data-level': OUTCOMES[a.outcome] ?? 'unknown' }, a.outcome), a.reason ? ` ${a.reason}` : '')),
    td('Details', { class: 'text' }, details(a.detail))));
  $('audit-body').replaceChildren(table('audit', [['When'], ['Who'], ['From'], ['What'], ['Outcome'], ['Details']], rows),
    h('p', { class: 'muted' }, `The last ${entries.length}; posthaste audit shows all.`));
}

// ---- asking before doing

let asked = null;

function ask({ title, body, yes, danger, token: wanted, act }) {
  asked = { act };
  text($('ask-title'), title);
  $('ask-body').replaceChildren(...body);
  text($('ask-yes'), yes);
  $('ask-yes').className = danger ? 'danger' : 'primary';
  $('ask-yes').disabled = false;
  $('ask-error').hidden = true;
  $('ask-token').value = '';
  $('ask-token-label').hidden = !wanted;
  $('ask').showModal();
  ($('ask-token-label').hidden ? $('ask-yes') : $('ask-token')).focus();
}

$('ask-no').addEventListener('click', () => $('ask').close());
$('ask-form').addEventListener('submit', async (e) => {
  e.preventDefault();
  const now = asked;
  if ($('ask-token').value) token = $('ask-token').value.trim();
  $('ask-yes').disabled = true;
  try {
    await now.act();
    try { if (token) sessionStorage.setItem('posthaste-token', token); } catch { /* kept in memory only */ }
    if (asked === now) $('ask').close();
  } catch (err) {
    if (asked !== now) return;
    if (err.status === 401 || err.status === 403) { // none, a wrong one, or one that may read only
      token = null;
      try { sessionStorage.removeItem('posthaste-token'); } catch { /* was in memory only */ }
      $('ask-token-label').hidden = false;
      $('ask-token').value = '';
      $('ask-token').focus();
    }
    text($('ask-error'), err.status === 401 ? 'The admin token is wrong. It is the value of POSTHASTE_ADMIN_TOKEN of this process.' : err.message);
    $('ask-error').hidden = false;
  } finally {
    $('ask-yes').disabled = false;
    loadAudit();
  }
});

// ---- the switch

const WHAT = {
  auto: ['poll empties the outbox, then the relay switches to cdc.', 'While the slot cannot be used, it polls and says why.', 'Nothing is lost or published twice, and the order per aggregate is kept.'],
  cdc: ['As auto; but while it has to poll, /readyz of the relay answers 503.', 'Choose it if poll is too slow for you and you want an alert.', 'Nothing is lost or published twice, and the order per aggregate is kept.'],
  poll: ['cdc settles what is in flight and stops; then every relay polls the table.', 'Latency rises from about 2 to about 10 ms. The slot is kept and advanced.', 'Nothing is lost or published twice, and the order per aggregate is kept.'],
};

$('switch').addEventListener('click', (e) => {
  const to = e.target.closest('button')?.dataset.mode;
  if (!to) return;
  const p = state?.postgres.as_of && !state.postgres.error ? state.postgres.value : null;
  ask({
    title: `Switch to ${to}?`, yes: `Switch to ${to}`,
    body: [
      p ? h('p', null, `Now: desired ${p.desired}, active ${p.mode}, ${plural(p.backlog.rows, 'event')} in the outbox.`) : h('p', null, `The state is not known: Postgres ${state?.postgres.error ? silence(state.postgres) : 'is being asked'}.`),
      h('ul', null, WHAT[to].map((w) => h('li', null, w))),
      p && !p.led ? h('p', { class: 'error' }, 'No relay leads: it takes effect when one does.') : '',
    ],
    act: async () => {
      await change('PUT', 'mode', { mode: to });
      if (p) follow(to, p);
    },
  });
});

// ---- trace

function trace(id) {
  $('trace-id').value = id;
  $('trace-user').value = '';
  $('trace').scrollIntoView({ block: 'nearest' });
  $('trace-form').requestSubmit();
}

$('trace-form').addEventListener('submit', async (e) => {
  e.preventDefault();
  const body = $('trace-body');
  body.replaceChildren(h('p', { class: 'empty' }, 'Looking…'));
  const q = new URLSearchParams({ id: $('trace-id').value.trim() });
  if ($('trace-user').value.trim()) q.set('user', $('trace-user').value.trim());
  try {
    const { steps, error } = await call('GET', `trace?${q}`);
    body.replaceChildren(h('ol', { class: 'path' }, steps.map((st) =>
      h('li', null, h('span', { class: 'muted' }, clock(st.at, true)), h('b', null, st.place), h('span', null, st.detail, h('br'), h('span', { class: 'mono muted' }, st.id, st.traceparent ? ` trace ${st.traceparent.split('-')[1]}` : ''))))),
    error ? h('p', { class: 'error' }, error) : '');
  } catch (err) {
    body.replaceChildren(err.status === 404 ? empty('Nothing found.', `${err.message[0].toUpperCase()}${err.message.slice(1)}.`) : h('p', { class: 'error' }, err.message));
  }
});

// ---- doctor

let diagnosed = since();
let diagnosing = null;

// diagnoseAnew looks again soon after something has changed: findings from before it would say that all is well.
function diagnoseAnew() {
  diagnosing ??= setTimeout(() => { diagnosing = null; loadDoctor(); }, Math.max(1000, 10000 - ago(diagnosed)));
}

async function loadDoctor() {
  diagnosed = since();
  const again = $('doctor-again');
  again.disabled = true;
  text($('doctor-age'), 'looking…');
  try {
    const d = await call('GET', 'doctor');
    text($('doctor-age'), `as of ${clock(d.as_of)}`);
    const row = (f) => h('li', { 'data-level': f.severity }, h('span', null, h('span', { class: 'tag' }, f.severity)), h('b', null, f.check), h('span', null, f.detail, f.remedy ? h('span', { class: 'remedy' }, f.remedy) : ''));
    const rank = { fail: 0, warn: 1 };
    const wrong = d.findings.filter((f) => f.severity !== 'ok').sort((a, b) => rank[a.severity] - rank[b.severity]);
    const fine = d.findings.filter((f) => f.severity === 'ok');
    $('doctor-body').replaceChildren(
      wrong.length ? h('ul', { class: 'findings' }, wrong.map(row)) : empty('No complaint.', ''),
      h('details', null, h('summary', null, `${plural(fine.length, 'check')} fine, with the capacity sum`), h('ul', { class: 'findings' }, fine.map(row))));
  } catch (err) {
    text($('doctor-age'), '');
    $('doctor-body').replaceChildren(h('p', { class: 'error' }, err.message));
  }
  again.disabled = false;
}

// ---- everything together

function onState(st) {
  if (state && state.verdict.title !== st.verdict.title && state.verdict.level !== st.verdict.level) diagnoseAnew();
  state = st;
  if (st.sample && (!samples.length || samples[samples.length - 1].t < st.sample.t)) {
    samples.push(st.sample);
    if (samples.length > RING) samples = samples.slice(-RING);
    drawCharts();
  }
  onEvents(st.events);
  drawVerdict(st.verdict);
  drawSources(st);
  pipeline.draw(st);
  drawMode(st);
  drawHandover(st);
  drawTypes(st);
  drawStreams(st);
  drawGroups(st);
  $('trace-shop').hidden = !st.postgres.value.shop;
  const n = st.dead.value;
  // As many as before may be others; where there are none, there is nothing to look at again.
  const key = JSON.stringify([n, st.dead.error, n.relay + n.groups + n.retrying > 0 && st.dead.as_of]);
  if (key !== deadKey) {
    deadKey = key;
    loadDead(false);
  }
}

$('events-pause').addEventListener('click', (e) => {
  paused = !paused;
  e.target.setAttribute('aria-pressed', String(paused));
  text(e.target, paused ? 'Resume' : 'Pause');
  drawEvents();
});
$('doctor-again').addEventListener('click', () => loadDoctor());
$('verdict-action').addEventListener('click', (e) => { if (e.currentTarget.hash === '#doctor') loadDoctor(); });

const themes = ['auto', 'light', 'dark'];
const themed = () => document.documentElement.dataset.theme ?? 'auto';
$('theme').addEventListener('click', () => {
  const next = themes[(themes.indexOf(themed()) + 1) % themes.length];
  if (next === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try { localStorage.setItem('posthaste-theme', next); } catch { /* until the page is closed */ }
  text($('theme'), `Theme: ${next}`);
});
text($('theme'), `Theme: ${themed()}`);

function start() {
  poll();
  loadHistory().catch(() => {}).finally(() => { loadDoctor(); loadAudit(); });
}

drawCharts();
drawEvents();
setInterval(watchConnection, 500);
loadSession().then(start, (err) => { if (err.status === 401) needToken(); else start(); });
setInterval(() => { if (document.visibilityState === 'visible' && lostSince === null && !locked) { loadDoctor(); loadAudit(); } }, 60000);
