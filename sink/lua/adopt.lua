-- Raises the gate to a new owner. What earlier owners left unsettled becomes the doubt, and all lanes end. Where the stream has
-- forgotten it there is no doubt: it is to be published again.
-- KEYS stream, gate. ARGV source, epoch, nonce, force ("1": take it from another source), intact ("1": the caller has seen a
-- gate, and a stream that has forgotten nothing; {GAP} if that is so no more)
local gate = KEYS[2]
local source, epoch, nonce, force, intact = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5] == '1'

local g, err = read(gate, 'source', 'owner', 'n', 'last')
if err then return err end
if g[1] and g[1] ~= source and not force then return {'FOREIGN', g[1]} end
if g[1] == source and g[2] then
  local e, n = string.match(g[2], '^(%d+)|(%x+)')
  local theirs, mine = tonumber(e), tonumber(epoch)
  if theirs == mine and n == nonce then return {'OK', tonumber(redis.call('HGET', gate, 'n') or '0')} end
  if theirs >= mine then return {'FENCED', e} end
end

local gone = forgot(last_id_of(KEYS[1]), tonumber(g[3] or '0'), g[4])
if intact and (gone or not g[1]) then return {'GAP'} end
local all = redis.call('HGETALL', gate)
local doubt, drop, known = {}, {}, 0
for i = 1, #all, 2 do
  local field, value = all[i], all[i + 1]
  local kind = string.sub(field, 1, 2)
  if kind == 'u:' then
    drop[#drop + 1] = field
    if not gone then
      each(value, function(id)
        doubt[#doubt + 1] = 'd:' .. id
        doubt[#doubt + 1] = 'a'
      end)
    end
  elseif kind == 'l:' then
    drop[#drop + 1] = field
  elseif kind == 'd:' and gone then
    drop[#drop + 1] = field
  elseif kind == 'd:' then
    known = known + 1
    doubt[#doubt + 1] = field
    doubt[#doubt + 1] = 'a'
  end
end
redis.call('HSET', gate, 'source', source, 'owner', epoch .. '|' .. nonce .. '|ids')
local added = hset(gate, doubt)
hdel(gate, drop)
set_doubt(gate, known + added)
-- Whoever adopts has noticed it; it is not to be noticed again.
if gone then redis.call('HDEL', gate, 'n', 'last') end
return {'OK', tonumber(redis.call('HGET', gate, 'n') or '0')}
