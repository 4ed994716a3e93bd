-- Put behind gate.lua, in front of the scripts that know of streams which several databases share.
--
-- Such a stream has one gate for each source, {<stream>}:gate:<source>, and where the gate of a stream that is not shared is,
-- {<stream>}:gate, it has a register. So a script that does not know of sharing finds a gate of somebody else there:
--   source   "shared"
--   owner    nobody
--   id       of the register. A gate has the id of the register it was made under as "reg": one that has another, or none,
--            does not know what has happened since, and is none
--   s:<name> uuid of the database whose entries have this source field
--   drop:<source> when that database said that the stream is to be deleted, in ms
--
-- A gate of a shared stream has, if somebody else has seen that the stream lacks what it has let through:
--   gone     the last id that the stream gave then, '' without one; a lower one if it has lost more since. The owner is the one
--            before, without a nonce: who had the gate has to adopt it again, with a higher epoch, before anything else

local SHARED = 'shared'

-- shared_of returns where the register is if gate is one of a shared stream.
local function shared_of(gate, source)
  if string.sub(gate, -#source - 1) == ':' .. source then return string.sub(gate, 1, -#source - 2) end
end

-- register_of returns the id of a register, and of each name the source; nil if there is none.
local function register_of(base)
  if redis.call('HGET', base, 'source') ~= SHARED then return nil end
  local all, id, names = redis.call('HGETALL', base), '', {}
  for i = 1, #all, 2 do
    if all[i] == 'id' then id = all[i + 1] end
    if string.sub(all[i], 1, 2) == 's:' then names[string.sub(all[i], 3)] = all[i + 1] end
  end
  return id, names
end

-- receded tells whether a stream has lost still more since it gave an id that was noted as "gone".
local function receded(last_id, gone)
  return gone and gone ~= '' and forgot(last_id, 1, gone)
end

-- lacks tells whether a stream lacks what a gate has let through, so that somebody has to notice it; or more of it than was
-- noticed.
local function lacks(gate, last_id)
  local g = redis.call('HMGET', gate, 'n', 'last', 'gone')
  return forgot(last_id, tonumber(g[1] or '0'), g[2]) or receded(last_id, g[3])
end

-- deserted tells whether an empty stream lacks what its gate, or another one that shares it, has let through; or whether its
-- gate is none any more.
local function deserted(stream, gate, source, n, last)
  local last_id = last_id_of(stream)
  if forgot(last_id, n, last) then return true end
  local base = shared_of(gate, source)
  if not base then return false end
  local id, names = register_of(base)
  if id ~= redis.call('HGET', gate, 'reg') then return true end
  for _, other in pairs(names) do
    if other ~= source and lacks(base .. ':' .. other, last_id) then return true end
  end
  return false
end
