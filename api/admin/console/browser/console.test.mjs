// Tests of the console in a real browser, against the real processes that cmd/posthaste/browser_test.go has started.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { after, before, test } from 'node:test';
import { chromium } from 'playwright-core';

const { RELAY, GUARDED, SERVE, CONTROL, TOKEN, READ_TOKEN, POSTHASTE_SCREENSHOTS: SHOTS } = process.env;
const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const DESKTOP = { width: 1280, height: 860 };
const PHONE = { width: 390, height: 844 };

let browser;
const complaints = []; // what no page may ever do

before(async () => {
  browser = await chromium.launch({
    executablePath: process.env.POSTHASTE_TEST_CHROMIUM ?? '/usr/bin/chromium', // Debian's,
    // A container's root may not sandbox, and its /dev/shm is small.
    args: ['--disable-dev-shm-usage', ...(process.getuid() === 0 ? ['--no-sandbox'] : [])],
  });
});

after(async () => {
  await browser.close();
  assert.deepEqual(complaints, [], 'console errors and requests to other hosts');
});

// open shows the console of a process. expected are complaints of the console that the test provokes.
async function open(origin, { viewport = DESKTOP, scheme = 'light', expected = [], live = 'live' } = {}) {
  const context = await browser.newContext({ viewport, colorScheme: scheme, reducedMotion: SHOTS ? 'no-preference' : 'reduce' });
  const page = await context.newPage();
  page.setDefaultTimeout(15000);
  page.on('console', (m) => {
    if (['error', 'warning'].includes(m.type()) && !expected.some((e) => m.text().includes(e))) complaints.push(`${m.type()}: ${m.text()}`);
  });
  page.on('pageerror', (e) => complaints.push(`exception: ${e.message}`));
  page.on('request', (r) => { if (new URL(r.url()).origin !== origin) complaints.push(`request: ${r.url()}`); });
  await page.goto(`${origin}/console/`);
  await page.locator('#connection', { hasText: live }).waitFor();
  return page;
}

async function control(path) {
  const resp = await fetch(`${CONTROL}${path}`, { method: 'POST' });
  const body = await resp.text();
  assert.equal(resp.status, 200, `${path}: ${body}`);
  return JSON.parse(body || 'null');
}

async function until(what, within, cond) {
  const end = Date.now() + within;
  for (;;) {
    const v = await cond();
    if (v) return v;
    if (Date.now() > end) assert.fail(`waited ${within} ms for ${what}`);
    await new Promise((r) => { setTimeout(r, 50); });
  }
}

const relay = async () => (await fetch(`${RELAY}/relay`)).json();
const mode = (want) => until(`mode ${want}`, 20000, async () => (await relay()).mode === want);
const verdict = (page, level, within) => page.locator(`#verdict[data-level="${level}"]`).waitFor({ timeout: within });
const node = (page, name, level, within) => page.locator(`[data-node="${name}"][data-level="${level}"]`).waitFor({ timeout: within });

async function axe(page, what) {
  await page.evaluate(AXE); // by the debugger, which the page's policy does not bind
  const found = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
  const serious = found.violations.filter((v) => ['serious', 'critical'].includes(v.impact));
  assert.deepEqual(serious.map((v) => `${v.id}: ${v.help}: ${v.nodes.map((n) => `${n.target} ${n.failureSummary}`).join(' | ')}`), [], what);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  assert.ok(wide <= 0, `${what}: the page is ${wide} px too wide`);
}

async function shot(page, name, options) {
  if (SHOTS) await page.screenshot({ path: `${SHOTS}/${name}.png`, ...options });
}

const looks = [['light', DESKTOP], ['dark', DESKTOP], ['light', PHONE], ['dark', PHONE]];

// accessible looks at a page in every look there is.
async function accessible(page, what) {
  await page.locator('#doctor-age', { hasText: 'as of' }).waitFor();
  for (const [colorScheme, viewport] of looks) {
    await page.emulateMedia({ colorScheme });
    await page.setViewportSize(viewport);
    await axe(page, `${what}, ${colorScheme}, ${viewport.width} px`);
  }
  await page.emulateMedia({ colorScheme: 'light' });
  await page.setViewportSize(DESKTOP);
}

test('orders appear as they are placed, without their payload', async () => {
  const page = await open(RELAY);
  await verdict(page, 'ok');
  const ids = await control('/orders');
  for (const id of ids) await page.locator('#events-body tr', { hasText: id }).waitFor();
  assert.ok(!(await page.content()).includes('314159265'), 'the amount is on the page');
  await page.locator('[data-node="groups"]', { hasText: '1 consumer group' }).waitFor();

  await page.locator('#events-body tr', { hasText: ids[0] }).getByRole('button').first().click();
  for (const place of ['order', 'inserted', 'in stream', 'settled', 'group mailer']) await page.locator('#trace-body li', { hasText: place }).first().waitFor();
  await page.reload();
  await page.locator('#events-body tr', { hasText: ids[2] }).waitFor();
  await page.locator('#chart-backlog path.l1').first().waitFor({ state: 'attached' });
  await page.context().close();
});

test('a hidden page requests nothing, and the state at once when it is shown', async () => {
  const [page, other] = [await open(RELAY), await open(RELAY)];
  const state = (r) => r.url().endsWith('/api/state');
  const show = (visibility) => page.evaluate((v) => {
    Object.defineProperty(document, 'visibilityState', { value: v, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
  }, visibility);
  await show('hidden');
  let requests = 0;
  page.on('request', (r) => { requests += state(r); });
  for (let i = 0; i < 5; i++) await other.waitForRequest(state);
  assert.equal(requests, 0, 'requests of the hidden page');
  await show('hidden'); // a change that does not show it
  for (let i = 0; i < 3; i++) await other.waitForRequest(state);
  assert.equal(requests, 0, 'requests of the hidden page');
  await Promise.all([page.waitForRequest(state), show('visible')]);
  for (let i = 0; i < 3; i++) await page.waitForRequest(state);
  await page.locator('#connection', { hasText: 'live' }).waitFor();
  await page.context().close();
  await other.context().close();
});

test('a process without a relay shows what it can', async () => {
  const page = await open(SERVE);
  await verdict(page, 'ok');
  await page.locator('#mode-rows', { hasText: 'cdc since' }).waitFor();
  await page.locator('#chart-latency', { hasText: 'Measured by the relay' }).waitFor();
  const ids = await control('/orders');
  await page.locator('#events-body tr', { hasText: ids[0] }).waitFor();
  await page.context().close();
});

test('a group of a type with several streams is one row, which unfolds', async () => {
  const page = await open(RELAY);
  const rows = page.locator('#groups-body tbody tr');
  const fold = rows.getByRole('button', { name: 'mailer on the streams of outbox.order' });
  await until('orders in both streams', 20000, async () => {
    await control('/orders');
    return (await fold.textContent()).includes('2 streams');
  });
  assert.equal(await rows.filter({ hasText: 'outbox.order.1' }).count(), 0, 'the streams are shown unasked');
  await fold.focus();
  await page.keyboard.press('Enter');
  for (const n of [0, 1]) await rows.filter({ hasText: `outbox.order.${n}` }).waitFor();
  await control('/orders'); // the table is drawn anew
  await page.waitForTimeout(3000);
  for (const n of [0, 1]) await rows.filter({ hasText: `outbox.order.${n}` }).waitFor();
  assert.ok(await fold.evaluate((b) => b === document.activeElement), 'the keyboard is elsewhere');
  await accessible(page, 'unfolded');
  await fold.focus();
  await page.keyboard.press('Enter');
  await rows.filter({ hasText: 'outbox.order.1' }).waitFor({ state: 'detached' });
  await page.context().close();
});

test('the switch switches, by keyboard alone', async () => {
  for (let i = 0; i < 12; i++) await control('/orders'); // each is a button below the switch
  const page = await open(RELAY);
  const press = async (name) => {
    const button = page.locator(`#switch [data-mode="${name}"]`);
    await page.locator('a.skip').focus(); // the first of the page: Tab goes on from where the focus was last
    for (let i = 0; i < 30; i++) {
      await page.keyboard.press('Tab');
      if (await button.evaluate((b) => b === document.activeElement)) break;
    }
    assert.ok(await button.evaluate((b) => b === document.activeElement), `${name} cannot be reached by Tab`);
    await page.keyboard.press('Enter');
    await page.locator('#ask-title', { hasText: `Switch to ${name}?` }).waitFor();
  };
  await verdict(page, 'ok');
  await press('poll');
  await page.keyboard.press('Escape');
  assert.equal((await relay()).desired, 'auto', 'Escape did not cancel');
  await press('poll');
  await page.keyboard.press('Enter');
  await page.locator('#handover-title', { hasText: 'Switched to poll' }).waitFor();
  await mode('poll');
  await node(page, 'wal', 'off');
  await page.locator('#switch [data-mode="poll"][aria-pressed="true"]').waitFor();
  await press('auto');
  await page.keyboard.press('Enter');
  await page.locator('#handover-title', { hasText: 'Switched to auto' }).waitFor({ timeout: 25000 });
  await mode('cdc');
  for (const to of ['poll', 'auto']) await page.locator('#audit-body tr', { hasText: `mode ${to}` }).first().waitFor();
  await page.context().close();
});

test('a killed Redis turns the picture red within 5 s, and back', async () => {
  const page = await open(RELAY);
  await verdict(page, 'ok');
  await control('/redis/kill');
  await Promise.all([node(page, 'redis', 'bad', 5000), verdict(page, 'bad', 5000)]);
  await page.locator('#verdict-title', { hasText: 'Redis does not take events' }).waitFor();
  await page.locator('#doctor-body', { hasText: 'refuses the connection' }).waitFor(); // looked again by itself
  const ids = await control('/orders'); // taken without Redis
  await page.locator('#verdict-why', { hasText: '(3 now)' }).waitFor();
  await page.locator('[data-node="outbox"]', { hasText: '3wait, the oldest' }).waitFor();
  // Figures from before are not those of now: they are grey, and said to be old.
  await node(page, 'groups', 'unknown');
  assert.match(await page.locator('[data-node="groups"]').textContent(), /–not known$/);
  await page.locator('#groups-body .unknown .tag[data-level="unknown"]', { hasText: 'not known' }).first().waitFor();
  await page.locator('#streams-body .unknown td', { hasText: 'not known' }).first().waitFor();
  await page.locator('#dead-body', { hasText: 'Not known.' }).waitFor();
  assert.equal((await page.locator('#dead-body').textContent()).split('refused').length, 2, 'the cause is said for each stream');
  assert.match(await page.locator('#sources').textContent(), /Redis does not answer since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC/);
  await shot(page, 'console-redis-down');
  await accessible(page, 'Redis down');
  await control('/redis/start');
  await node(page, 'redis', 'ok');
  await verdict(page, 'ok');
  await page.locator('#events-body tr', { hasText: ids[2] }).waitFor();
  await page.context().close();
});

test('a frozen Redis is shown and does not freeze the page', async () => {
  const page = await open(RELAY);
  await verdict(page, 'ok');
  await control('/redis/freeze');
  await verdict(page, 'bad', 15000);
  assert.equal(await page.locator('#connection').textContent(), 'live');
  await control('/redis/thaw');
  await verdict(page, 'ok');
  await page.context().close();
});

test('a dead event is found, retried and arrives', async () => {
  const page = await open(RELAY);
  const id = await control('/poison?type=invoice');
  await page.locator('#dead-body tr', { hasText: id }).waitFor({ timeout: 30000 });
  await page.locator('#verdict-title', { hasText: '1 event is dead: Redis refuses it' }).waitFor();
  await page.locator('#verdict-action', { hasText: 'dead events' }).click();
  await shot(page, 'console-dead');
  await accessible(page, 'a dead event');
  await control('/fix?type=invoice');
  await page.getByRole('button', { name: /^Retry invoice\.sent/ }).click();
  await page.getByRole('button', { name: 'Retry', exact: true }).last().click();
  await until('the event', 20000, async () => (await control('/published?type=invoice')).includes(id));
  await page.locator('#dead-body', { hasText: 'None.' }).waitFor({ timeout: 60000 });
  await verdict(page, 'ok');
  await page.context().close();
});

test('dead events with one cause are one row, and are retried or dropped together', async () => {
  const page = await open(RELAY, { viewport: PHONE });
  const yes = page.locator('#ask-yes');
  const row = (n) => page.locator('#dead-body tr', { hasText: `${n} events` });
  await control('/poison?type=bill&n=600');
  await row(600).waitFor({ timeout: 40000 });
  assert.equal(await page.locator('#dead-body tbody tr').count(), 1);
  await page.locator('#verdict-title', { hasText: '600 events are dead: Redis refuses them' }).waitFor();
  assert.match(await page.locator('#verdict-why').textContent(), /the key outbox\.bill\.\d holds a string/);
  assert.match(await page.locator('#verdict-remedy').textContent(), /redis-cli RENAMENX outbox\.bill\.\d \S+, .* posthaste dead retry --all/);
  const [manual] = await Promise.all([page.waitForEvent('popup'), page.locator('#verdict-runbook a').click()]);
  await manual.locator('#outboxdeadevents:target h1', { hasText: 'OutboxDeadEvents' }).waitFor();
  await axe(manual, 'the runbook');
  await manual.close();
  const height = () => page.evaluate(() => document.documentElement.scrollHeight);
  assert.ok(await height() < 6000, `the page is ${await height()} px high`);
  await page.getByRole('button', { name: /^the 600 events/ }).click();
  await until('the first of them', 5000, async () => (await page.locator('#dead-body tr.sub').count()) === 20);
  assert.ok(await height() < 6000, `unfolded, the page is ${await height()} px high`);
  await accessible(page, '600 dead events');

  await page.getByRole('button', { name: 'Drop all 600 events' }).click();
  await page.locator('#ask-title', { hasText: 'Drop 600 events for good?' }).waitFor();
  await page.locator('#ask-no').click();
  assert.equal((await relay()).dead, 600, 'Cancel did not cancel');
  await page.getByRole('button', { name: 'Drop all 600 events' }).click();
  await yes.click();
  await page.locator('#dead-body', { hasText: 'None.' }).waitFor({ timeout: 60000 });
  await page.locator('#audit-body tr', { hasText: 'dead drop' }).filter({ hasText: 'and 197 more' }).first().waitFor();

  const id = await control('/poison?type=bill&n=3');
  await row(3).waitFor({ timeout: 40000 });
  await control('/fix?type=bill');
  await page.getByRole('button', { name: 'Retry all 3 events' }).click();
  await yes.click();
  await until('the events', 20000, async () => (await control('/published?type=bill')).includes(id));
  await page.locator('#dead-body', { hasText: 'None.' }).waitFor({ timeout: 60000 });
  await page.locator('#audit-body tr', { hasText: 'dead retry' }).first().waitFor();
  await verdict(page, 'ok');
  await page.context().close();
});

test('streams are listed, and one type can be shown alone', async () => {
  const page = await open(RELAY);
  const ids = await control('/orders');
  const order = page.locator('#streams-body tr', { hasText: 'outbox.order' });
  const cell = (label) => order.locator(`[data-label="${label}"]`).textContent();
  await page.locator('#events-body tr', { hasText: ids[0] }).waitFor();
  await until('length, rate, memory and groups', 10000, async () => /^[1-9]/.test(await cell('Length')) && /^[\d.]+\/s$/.test(await cell('Rate')) &&
    /iB$/.test(await cell('Memory')) && (await cell('Groups')) === 'mailer');
  await page.locator('#type').selectOption('outbox.invoice');
  await order.waitFor({ state: 'detached' });
  await page.locator('#streams-body tr', { hasText: 'outbox.invoice' }).waitFor();
  await page.locator('#groups-body', { hasText: 'outbox.order' }).waitFor({ state: 'detached' });
  await page.locator('#events-body tr', { hasText: 'invoice.sent' }).first().waitFor();
  assert.equal(await page.locator('#events-body tr', { hasText: 'order.created' }).count(), 0);
  await page.locator('#type').selectOption('');
  await page.locator('#events-body tr', { hasText: ids[0] }).waitFor();
  await page.context().close();
});

test('without the tokens nothing is shown or changed', async () => {
  const put = (headers) => fetch(`${GUARDED}/console/api/mode`, { method: 'PUT', headers, body: '{"mode":"poll"}' });
  const as = (token) => ({ Authorization: `Bearer ${token}` });
  assert.equal((await put(as(TOKEN))).status, 403, 'without the page’s token');
  assert.equal((await fetch(`${GUARDED}/console/api/session`)).status, 401, 'without any token');
  const { csrf } = await (await fetch(`${GUARDED}/console/api/session`, { headers: as(READ_TOKEN) })).json();
  assert.equal((await put({ 'X-Posthaste-Csrf': csrf })).status, 401, 'without the admin token');
  assert.equal((await put({ 'X-Posthaste-Csrf': csrf, ...as(READ_TOKEN) })).status, 403, 'with the read token');

  const page = await open(GUARDED, { expected: ['401', '403'], live: 'the admin token is missing' });
  const answer = async (token) => {
    await page.locator('#ask[open]').waitFor();
    await page.locator('#ask-token').fill(token);
    await page.locator('#ask-yes').click();
  };
  await answer('wrong');
  await page.locator('#ask-error', { hasText: 'is wrong' }).waitFor();
  await axe(page, 'the dialog');
  await answer(READ_TOKEN);
  await page.locator('#ask[open]').waitFor({ state: 'detached' });
  await verdict(page, 'ok');
  await page.locator('#switch [data-mode="cdc"]').click();
  assert.equal(await page.locator('#ask-token-label').isVisible(), false, 'asked for a token that is there');
  await page.locator('#ask-yes').click();
  await page.locator('#ask-error', { hasText: 'may read only' }).waitFor();
  assert.equal((await relay()).desired, 'auto');
  await answer(TOKEN);
  await until('desired cdc', 5000, async () => (await relay()).desired === 'cdc');
  await page.locator('#ask[open]').waitFor({ state: 'detached' });
  await page.reload(); // the token is kept for this tab
  await verdict(page, 'ok');
  await page.locator('#switch [data-mode="auto"]').click();
  assert.equal(await page.locator('#ask-token-label').isVisible(), false, 'asked for the token again');
  await page.locator('#ask-yes').click();
  await until('desired auto', 5000, async () => (await relay()).desired === 'auto');
  await page.context().close();
});

test('it is accessible, light and dark, on a desk and on a phone', async () => {
  const page = await open(RELAY);
  await verdict(page, 'ok');
  await page.locator('#theme').click(); // what the reader chooses wins over the system
  assert.equal(await page.locator('html').getAttribute('data-theme'), 'light');
  await page.locator('#theme').click();
  await page.locator('#theme').click();
  await accessible(page, 'all well');
  await page.context().close();
});

if (SHOTS) test('pictures for the documentation', async () => {
  await control('/load?rate=60');
  const page = await open(RELAY);
  for (const rate of [60, 180, 120, 240]) {
    await control(`/load?rate=${rate}`);
    await page.waitForTimeout(50000);
  }
  await shot(page, 'console');
  for (const [name, scheme, viewport] of [['console-dark', 'dark', DESKTOP], ['console-phone', 'light', PHONE]]) {
    const p = await open(RELAY, { scheme, viewport });
    await p.locator('#doctor-age', { hasText: 'as of' }).waitFor();
    await p.waitForTimeout(3000);
    await shot(p, name, name === 'console-phone' ? { fullPage: true, clip: { x: 0, y: 0, ...PHONE, height: 1700 } } : {});
    await p.context().close();
  }
  await control('/load');
  await page.context().close();
});

test('a lost process is shown as such', async () => {
  const page = await open(GUARDED, {
    expected: ['401', 'ERR_CONNECTION_REFUSED', 'ERR_CONNECTION_RESET', 'ERR_EMPTY_RESPONSE'],
    live: 'the admin token is missing',
  });
  await page.locator('#ask-token').fill(READ_TOKEN);
  await page.locator('#ask-yes').click();
  await page.locator('#connection', { hasText: 'live' }).waitFor();
  await verdict(page, 'ok');
  // What the page asks for at its start has come: a question without an answer would be one more complaint.
  await page.locator('#doctor-age', { hasText: 'as of' }).waitFor();
  await page.locator('#dead-body', { hasText: 'None.' }).waitFor();
  await control('/guarded/kill');
  await page.locator('#connection', { hasText: 'lost since' }).waitFor();
  await page.locator('#verdict-title', { hasText: 'Connection to this process lost since' }).waitFor();
  await page.context().close();
});
