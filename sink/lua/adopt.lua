-- Raises the gate to a new owner. What earlier owners left unsettled becomes the doubt, and all lanes end. Where the stream has
-- forgotten it there is no doubt: it is to be published again.
--
-- A gate of the same source in the other form, shared or not, becomes this one; with force those of others that are in the way,
-- too. It is one step: whoever is killed has changed the form, with all that the gate knows, or has not.
-- KEYS stream, the gate of one that is not shared, where it is shared this source's. ARGV source, epoch, nonce, force ("1": take it from another source), let
-- (the caller has seen a gate that had let through so many events, and a stream that has forgotten nothing; {GAP} if that is so no
-- more. -1: whatever there is will do), the source field of this database's entries if it shares the stream, else ''
-- Answers {OK, n}, {GAP}, {FENCED, epoch}, {FOREIGN, source}; {UNSHARED, source}: another database does not share it; {SHARED,
-- name}: others do; {NAMED, source}: another one has the same name; {FORM}: this owner has raised it in the other form; {KEYS}: the
-- third key is needed
local stream, base = KEYS[1], KEYS[2]
local source, epoch, nonce, force, least, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', tonumber(ARGV[5]), ARGV[6]
local own = base .. ':' .. source
local gate = name ~= '' and own or base

local b, err = read(base, 'source')
if err then return err end
-- The gates that become this one, and which of them are this source's.
local from, ours = {}, {}
local function take(key, us)
  from[#from + 1] = key
  ours[key] = us
end
local id, names
local known = b[1] and b[1] ~= SHARED
if b[1] ~= SHARED then
  if b[1] and b[1] ~= source and not force then return {name == '' and 'FOREIGN' or 'UNSHARED', b[1]} end
  if b[1] or name == '' then take(base, b[1] == source) end
else
  if #KEYS < 3 then return {'KEYS'} end
  id, names = register_of(base)
  if redis.call('HGET', own, 'reg') == id then take(own, true) end
  known = #from > 0
  for other, theirs in pairs(names) do
    if theirs ~= source and (name == '' or other == name) then
      if not force then return name == '' and {'SHARED', other} or {'NAMED', theirs} end
      take(base .. ':' .. theirs, false)
    end
  end
end
local last_id, gone, n, last = last_id_of(stream), false, 0, nil
local lost = {}
for _, key in ipairs(from) do
  local g = redis.call('HMGET', key, 'owner', 'n', 'last', 'gone')
  if ours[key] and g[1] then
    local e, m = string.match(g[1], '^(%d+)|(%x+)$')
    local theirs, mine = tonumber(e), tonumber(epoch)
    if theirs == mine and m == nonce then
      if key ~= gate then return {'FORM'} end
      return {'OK', tonumber(g[2] or '0')}
    end
    if theirs >= mine then return {'FENCED', e} end
    -- Whoever had it when it was told of the loss has not noticed: this is a call that arrives late.
    if g[4] and theirs + 1 == mine then return {'GAP'} end
  end
  local let = tonumber(g[2] or '0')
  lost[key] = g[4] or forgot(last_id, let, g[3])
  if lost[key] then
    gone = true
  else
    n = n + let
    if g[3] and (not last or forgot(last, 1, g[3])) then last = g[3] end
  end
end
if least >= 0 and (gone or not known or n < least) then return {'GAP'} end

local doubt, drop, seen = {}, {}, {}
local function doubtful(f)
  if not seen[f] then
    seen[f] = true
    doubt[#doubt + 1] = f
    doubt[#doubt + 1] = 'a'
  end
end
for _, key in ipairs(from) do
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local field, value = all[i], all[i + 1]
    local kind = string.sub(field, 1, 2)
    if kind == 'u:' and not lost[key] then
      each(value, function(event) doubtful('d:' .. event) end)
    elseif kind == 'd:' and not lost[key] then
      doubtful(field)
    end
    if key == gate and (kind == 'u:' or kind == 'l:' or kind == 'd:' and lost[key]) then drop[#drop + 1] = field end
  end
end

-- What the others have let through is theirs to restore, and the stream may have entries again before they look.
local told = {}
for other, theirs in pairs(name ~= '' and names or {}) do
  local key = base .. ':' .. theirs
  if theirs ~= source and other ~= name and lacks(key, last_id) then
    local g = redis.call('HMGET', key, 'owner', 'gone')
    local e = tonumber(string.match(g[1] or '1|', '^(%d+)'))
    -- One that is told again has had its owner taken already.
    told[key] = g[2] and (g[1] or '0|0') or int(math.max(e - 1, 0)) .. '|0'
  end
end

-- From here on nothing fails.
redis.call('HSET', gate, 'source', source, 'owner', epoch .. '|' .. nonce)
if ours[gate] == nil and gate == own then
  redis.call('DEL', own) -- it is of an earlier register
  redis.call('HSET', gate, 'source', source, 'owner', epoch .. '|' .. nonce)
end
for _, key in ipairs(from) do
  if key ~= gate then redis.call('DEL', key) end
end
if name == '' and id then -- the register is the gate now
  drop[#drop + 1] = 'id'
  for other, theirs in pairs(names) do
    drop[#drop + 1] = 's:' .. other
    drop[#drop + 1] = 'drop:' .. theirs
  end
  redis.call('DEL', own)
end
hset(gate, doubt)
hdel(gate, drop)
set_doubt(gate, #doubt / 2)
-- Whoever adopts has noticed it; it is not to be noticed again.
if n > 0 then redis.call('HSET', gate, 'n', int(n)) else redis.call('HDEL', gate, 'n') end
if last then redis.call('HSET', gate, 'last', last) else redis.call('HDEL', gate, 'last') end
if name == '' then return {'OK', n} end

if not id then
  id, names = source .. '|' .. epoch .. '|' .. nonce, {}
  redis.call('HSET', base, 'source', SHARED, 'owner', '0|0', 'id', id)
end
for other, theirs in pairs(names) do
  if theirs == source and other ~= name then redis.call('HDEL', base, 's:' .. other) end
end
redis.call('HSET', base, 's:' .. name, source)
redis.call('HSET', gate, 'reg', id)
redis.call('HDEL', gate, 'gone')
for key, owner in pairs(told) do
  redis.call('HSET', key, 'gone', last_id, 'owner', owner)
  redis.call('HDEL', key, 'n', 'last')
end
return {'OK', n}
