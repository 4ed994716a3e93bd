-- Reports whether the gate is still the caller's, and the stream has what it has let through.
-- KEYS stream, register, gate. ARGV epoch, nonce, how many groups to list at most (may be left out: none)
-- Answers {OK, group...}, {GAP} or {FENCED, epoch}. If the stream's key has another type, the answer is not GAP:
-- publishing there is refused and reported by the publisher.
local stream, base, gate = KEYS[1], KEYS[2], KEYS[3]

local g, err = read('HMGET', gate, 'owner', 'reg', 'last', 'n', 'base')
if err then return err end
local no = assess(g[1], ARGV[1], ARGV[2])
if no then return no end
if not g[2] or g[2] ~= redis.call('HGET', base, 'id') then return {'GAP'} end
local t = redis.call('TYPE', stream).ok
if t ~= 'stream' and t ~= 'none' then
  return ARGV[3] and redis.error_reply('WRONGTYPE the key ' .. stream .. ' holds a ' .. t) or {'OK'}
end
local s = state_of(stream)
if misses(s, g[3]) or short(s, g[4], g[5]) then return {'GAP'} end
local answer = {'OK'}
if ARGV[3] and s.length then
  for i, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if i > tonumber(ARGV[3]) then break end
    answer[i + 1] = fields(group)['name']
  end
end
return answer
