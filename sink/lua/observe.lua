-- Reads the state of a stream and its groups, without the bodies of the entries.
-- KEYS stream. ARGV groups at most, consumers of a group at most that are looked at (0: no limit)
-- Answers {length, entries added, first entry's id, now in ms, {name, pending, lag, entries read, last delivered,
-- oldest pending, consumers, ms since the last sign of life, first unread}…};
-- -1 and "" stand for unknown or none. A missing stream answers {0, 0, "", now}.
local stream = KEYS[1]
local most, watched = tonumber(ARGV[1]), tonumber(ARGV[2])

local t = redis.call('TIME')
local now = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
if redis.call('EXISTS', stream) == 0 then return {0, 0, '', now} end
local s = fields(redis.call('XINFO', 'STREAM', stream))
local first = s['first-entry'] and s['first-entry'][1] or ''

-- unread returns how many entries the group has not read, and the first of them. Redis' own count includes entries that
-- were trimmed unread, and is unknown after a deletion.
local function unread(g)
  local last = g['last-delivered-id']
  if first == '' or not less(last, s['last-generated-id']) then return 0, '' end
  if less(last, first) then return s['length'], first end
  local e = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
  if not e then return 0, '' end
  local lag = g['lag']
  return lag and math.max(1, math.min(lag, s['length'])) or -1, e[1]
end

-- seen returns how long ago a consumer of the group last showed itself. A server that knows "inactive" notes every
-- attempt to read, an older one only those that found something.
local function seen(name, consumers)
  local ms = -1
  if consumers == 0 or (watched > 0 and consumers > watched) then return ms end
  for _, list in ipairs(redis.call('XINFO', 'CONSUMERS', stream, name)) do
    local c = fields(list)
    if ms < 0 or c['idle'] < ms then ms = c['idle'] end
  end
  return ms
end

local answer = {s['length'], s['entries-added'] or -1, first, now}
for i, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  if most > 0 and i > most then break end
  local g = fields(group)
  local oldest = g['pending'] > 0 and redis.call('XPENDING', stream, g['name'])[2] or ''
  local lag, next_id = unread(g)
  answer[#answer + 1] = {g['name'], g['pending'], lag, g['entries-read'] or -1, g['last-delivered-id'], oldest or '',
    g['consumers'], seen(g['name'], g['consumers']), next_id}
end
return answer
