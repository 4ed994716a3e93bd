-- Reads dead events, a page at a time.
-- KEYS dead stream. ARGV where to begin, how many at most (fewer if they are large), 'all' or '': without it, payloads
-- are left out and the other fields are shortened
-- Answers {length, where to continue or '', {entry id, field, value, …}…}; a missing stream, or a key of another
-- kind, {0, ''}.
local key, from, all = KEYS[1], ARGV[1], ARGV[3] == 'all'
if redis.call('TYPE', key).ok ~= 'stream' then return {0, ''} end
local answer = {redis.call('XLEN', key), ''}
local bytes = 0
-- One at a time: a payload may be 8 MiB, and Redis copies each entry that it returns.
for _ = 1, tonumber(ARGV[2]) do
  local entry = redis.call('XRANGE', key, from, '+', 'COUNT', 1)[1]
  if not entry then return answer end
  local e = {entry[1]}
  for i = 1, #entry[2], 2 do
    bytes = bytes + #entry[2][i + 1]
    if all or entry[2][i] ~= 'data' then
      e[#e + 1] = entry[2][i]
      e[#e + 1] = all and entry[2][i + 1] or string.sub(entry[2][i + 1], 1, 2000)
    end
  end
  answer[#answer + 1] = e
  from = '(' .. entry[1]
  if bytes > 1048576 then break end
end
answer[2] = from
return answer
