-- Reads what the metrics of a stream need, and leaves the entries' bodies where they are.
-- KEYS stream. ARGV groups at most
-- Answers {length, entries added, first entry's id, {name, pending, lag, entries read, last delivered, oldest pending,
-- now in ms}…};
-- -1 and "" stand for unknown or none. A missing stream answers {0, 0, ""}.
local stream = KEYS[1]

local function fields(list)
  local f = {}
  for i = 1, #list, 2 do f[list[i]] = list[i + 1] end
  return f
end

if redis.call('EXISTS', stream) == 0 then return {0, 0, ''} end
local s = fields(redis.call('XINFO', 'STREAM', stream))
local first = s['first-entry'] and s['first-entry'][1] or ''
local t = redis.call('TIME')
local now = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
local answer = {s['length'], s['entries-added'] or -1, first}
for i, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  if i > tonumber(ARGV[1]) then break end
  local g = fields(group)
  local oldest = g['pending'] > 0 and redis.call('XPENDING', stream, g['name'])[2] or ''
  answer[#answer + 1] = {g['name'], g['pending'], g['lag'] or -1, g['entries-read'] or -1, g['last-delivered-id'],
    oldest or '', now}
end
return answer
