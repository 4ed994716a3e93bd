-- Reads the state of a stream and its new entries, without the payloads. KEYS stream. ARGV the last entry id read (''
-- for none), the maximum number of new entries (fewer when they are large). Returns {length, entries added, last id,
-- bytes of memory, {entry id, id, type, subject, time, replayed}…}, newest first. For a missing stream it returns
-- {0, 0, '', 0}. A count that the server does not have, or refuses, is -1.
local stream = KEYS[1]
if redis.call('EXISTS', stream) == 0 then return {0, 0, '', 0} end
local s = {}
local info = redis.call('XINFO', 'STREAM', stream)
for i = 1, #info, 2 do s[info[i]] = info[i + 1] end
local memory = redis.pcall('MEMORY', 'USAGE', stream)
if type(memory) ~= 'number' then memory = -1 end
local answer = {s['length'], s['entries-added'] or -1, s['last-generated-id'], memory}
if s['last-generated-id'] == ARGV[1] then return answer end
local from = ARGV[1] == '' and '-' or '(' .. ARGV[1]
local to, bytes = '+', 0
-- One entry at a time: a payload may be 8 MiB, and Redis copies every entry it returns. Beyond 1 MiB the rest is
-- skipped.
for _ = 1, tonumber(ARGV[2]) do
  local entry = redis.call('XREVRANGE', stream, to, from, 'COUNT', 1)[1]
  if not entry or bytes > 1048576 then break end
  local f = {}
  for i = 1, #entry[2], 2 do
    f[entry[2][i]] = entry[2][i + 1]
    bytes = bytes + #entry[2][i + 1]
  end
  local function field(name) return string.sub(f[name] or '', 1, 200) end
  answer[#answer + 1] = {entry[1], field('id'), field('type'), field('subject'), field('time'), field('replayed')}
  to = '(' .. entry[1]
end
return answer
