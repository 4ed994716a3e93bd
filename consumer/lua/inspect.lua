-- Measures the group, and settles what was trimmed before it was read.
--
-- Redis counts the entries a group has read (entries-read); its own lag ignores entries trimmed unread and is unknown
-- after a deletion. The true position is computed here wherever it can be known exactly: at the end of the stream,
-- before its first entry, or when few entries are left. The difference to entries-read is what was lost. With 'settle'
-- the counter is set right in the same call, so that a loss is counted once over all the group's consumers.
--
-- entries-read does not survive: a server that replays its append-only file, and a replica that becomes the primary,
-- have the group's position and an old count. So what the count says is believed only on the server (its run id is
-- noted) that has been counting since it was last set right; on another one it is set right, and nothing is called
-- lost for it.
-- KEYS[1] stream, KEYS[2] the note; ARGV group, 'settle' or ''.
-- Returns {length, pending, ms since the oldest pending entry was added or -1, lag or -1, lost}.
local k, g = KEYS[1], ARGV[1]
local function map(a)
  local m = {}
  for i = 1, #a, 2 do m[a[i]] = a[i + 1] end
  return m
end
local function before(a, b)
  local am, as = string.match(a, '(%d+)-(%d+)')
  local bm, bs = string.match(b, '(%d+)-(%d+)')
  am, bm, as, bs = tonumber(am), tonumber(bm), tonumber(as), tonumber(bs)
  return am < bm or (am == bm and as < bs)
end
local s = map(redis.call('XINFO', 'STREAM', k))
local grp
for _, i in ipairs(redis.call('XINFO', 'GROUPS', k)) do
  local m = map(i)
  if m['name'] == g then grp = m end
end
if not grp then return redis.error_reply('NOGROUP no such group') end
local added, read, last = s['entries-added'], grp['entries-read'], grp['last-delivered-id']
local first = s['first-entry'] and s['first-entry'][1]
local unread = -1
if not before(last, s['last-generated-id']) then
  unread = 0
elseif not first then
  unread = 0
elseif before(last, first) then
  unread = s['length']
else
  local from, n = '(' .. last, 0
  while n < 20 do -- one at a time, because payloads may be large
    local e = redis.call('XRANGE', k, from, '+', 'COUNT', 1)[1]
    if not e then break end
    from, n = '(' .. e[1], n + 1
  end
  if n < 20 then unread = n end
end
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
local noted = redis.call('GET', KEYS[2]) or run
local lost = 0
if unread >= 0 and read ~= added - unread then
  -- Lost entries have left the stream.
  if read and added - unread > read then lost = math.min(added - unread - read, added - s['length']) end
  if ARGV[2] == 'settle' then
    redis.call('XGROUP', 'SETID', k, g, last, 'ENTRIESREAD', added - unread)
  end
end
if noted ~= run then lost = 0 end
if ARGV[2] == 'settle' and unread >= 0 then redis.call('SET', KEYS[2], run, 'EX', 604800) end
local lag = unread
if lag < 0 and read then lag = math.max(0, math.min(s['length'], added - read)) end
local oldest = -1
local p = redis.call('XPENDING', k, g)
if p[1] > 0 then
  local t = redis.call('TIME')
  oldest = math.max(0, t[1] * 1000 + math.floor(t[2] / 1000) - tonumber(string.match(p[2], '(%d+)-')))
end
return {s['length'], p[1], oldest, lag, lost}
