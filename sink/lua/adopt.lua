-- Gives the gate of a database a new owner, and registers the database. The events that earlier owners left unsettled
-- become the doubt, and all lanes end. If the stream has lost the gate's events there is no doubt: they are published
-- again.
--
-- KEYS stream, register, gate, and those that an answer {KEYS, key…} demands
-- ARGV epoch, nonce, source, force ("1": take the stream from the databases that exclude this one), least (the caller
--      has seen a gate that had let through so many events, and a stream without losses: {GAP} if that is no longer
--      true; -1 accepts any state), the source field of the database's entries, alone ("1": it does not share the
--      stream)
-- Answers {OK, n}, {GAP}, {FENCED, epoch}, or {FOREIGN, source, names, "1" if that database does not share the stream}.
local stream, base, gate = KEYS[1], KEYS[2], KEYS[3]
local mine, nonce, source, force, least = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4] == '1', tonumber(ARGV[5])
local name, alone = ARGV[6], ARGV[7] == '1'

local r, own, err
r, err = register_of(base)
if err then return err end
local ask = undeclared(gates_of(r, base))
if ask then return ask end
own, err = read('HGETALL', gate)
if err then return err end
own = fields(own)
local known = r.id and own.reg == r.id

local replaced, others, obsolete = {}, {}, {}
for other, theirs in pairs(r.names) do
  local key = base .. ':' .. theirs
  if theirs == source then
    obsolete[#obsolete + 1] = other ~= name and 's:' .. other or nil
  elseif excludes(r, other, name, alone) then
    replaced[#replaced + 1] = key
    obsolete[#obsolete + 1] = 'drop:' .. theirs
    obsolete[#obsolete + 1] = other ~= name and 's:' .. other or nil
  else
    others[#others + 1] = key
  end
end
local foreign = foreign_to(r, source, name, alone)
if foreign and not force then return foreign end

if known then
  local theirs, n = owner_of(own.owner)
  if theirs == mine and n == nonce and not foreign then
    -- Whether the stream is shared changes with an owner. (By force, the setting of the owner's relay counts.)
    if not force and alone ~= (r.alone ~= nil) then return {'GAP'} end
    return {'OK', tonumber(own.n or '0')}
  end
  if theirs > mine or theirs == mine and n ~= nonce then return {'FENCED', int(theirs)} end
  -- The owner that had the gate when "gone" was set has not noticed the loss: this is a call that arrives late.
  if own.gone and theirs + 1 == mine then return {'GAP'} end
end

-- The gate inherits from the one before, and from those that it replaces.
local s, whole, n, last, doubt = state_of(stream), true, 0, nil, {}
local function doubtful(field) doubt[#doubt + 1], doubt[#doubt + 2] = field, 'a' end
local function inherit(g)
  if g.gone or misses(s, g.last) or short(s, g.n, g.base) then
    whole = false
    return
  end
  n = n + tonumber(g.n or '0')
  if lacks(last or '', g.last) then last = g.last end
  for field, value in pairs(g) do
    local kind = string.sub(field, 1, 2)
    if kind == 'u:' then each(value, function(event) doubtful('d:' .. event) end) end
    if kind == 'd:' then doubtful(field) end
  end
end
if known then inherit(own) end
for _, key in ipairs(replaced) do inherit(fields(redis.call('HGETALL', key))) end
if least >= 0 and not (known and whole and n >= least) then return {'GAP'} end

-- The relay of each other database restores its events, and the stream may have entries again before it looks.
local gone = {}
for _, key in ipairs(others) do
  if lost_events(key, s) then
    local g = redis.call('HMGET', key, 'owner', 'gone')
    local owner = g[1]
    if not g[2] then owner = int(math.max(owner_of(owner) - 1, 0)) .. '|0' end -- else it was lowered before
    gone[key] = owner
  end
end

local old = {}
for field in pairs(own) do old[#old + 1] = field ~= 'owner' and field ~= 'reg' and field or nil end

-- From here on nothing fails. The gate is never deleted: while its slot moves, Redis would not let it be made again.
local id = r.id or source .. '|' .. ARGV[1] .. '|' .. nonce
redis.call('HSET', base, 'id', id, 's:' .. name, source)
if alone then redis.call('HSET', base, 'alone', source) else redis.call('HDEL', base, 'alone') end
hdel(base, obsolete)
for _, key in ipairs(replaced) do redis.call('DEL', key) end
redis.call('HSET', gate, 'owner', ARGV[1] .. '|' .. nonce, 'reg', id)
hdel(gate, old)
if n > 0 then redis.call('HSET', gate, 'n', int(n)) end
local added = s.last == '' and 0 or s['entries-added']
if added then redis.call('HSET', gate, 'base', int(added - n)) end
if last then redis.call('HSET', gate, 'last', last) end
set_doubt(gate, hset(gate, doubt))
for key, owner in pairs(gone) do
  redis.call('HSET', key, 'gone', kept(s, r), 'owner', owner)
  redis.call('HDEL', key, 'n', 'base', 'last')
end
return {'OK', n}
