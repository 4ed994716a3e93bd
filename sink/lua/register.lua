-- Put behind gate.lua, in front of the scripts that use the register.
--
-- The register of a stream, {<stream>}:gate, is a hash of the databases that publish to it:
--   id            of the register. A gate that has another one as "reg" does not count: it was made under a register
--                 that was lost, and other databases may have noticed losses since that they could not note in it
--   s:<name>      the uuid of the database whose entries have this source field
--   alone         the uuid of the only registered database, if it does not share the stream
--   drop:<source> when that database dropped the stream, in ms

-- register_of returns a register's fields, with its names as a table; the id is nil if there is no register.
local function register_of(base)
  local all, err = read('HGETALL', base)
  if err then return nil, err end
  local r = fields(all)
  r.names = {}
  for field, value in pairs(r) do
    if string.sub(field, 1, 2) == 's:' then r.names[string.sub(field, 3)] = value end
  end
  return r
end

-- last_id_of returns the last id that a stream gave, '' if there is no stream.
local function last_id_of(stream)
  if redis.call('TYPE', stream).ok ~= 'stream' then return '' end
  return fields(redis.call('XINFO', 'STREAM', stream))['last-generated-id']
end

-- lost_events reports whether a stream has lost events of a gate that are not noted in it as "gone".
local function lost_events(gate, last_id)
  local g = redis.call('HMGET', gate, 'last', 'gone')
  return lacks(last_id, g[1]) or lacks(last_id, g[2])
end

-- deserted reports whether an empty stream lacks events of any gate, or whether the caller's gate does not count.
local function deserted(stream, base, gate)
  local r = register_of(base)
  if not r or not r.id or r.id ~= redis.call('HGET', gate, 'reg') then return true end
  local last_id = last_id_of(stream)
  for _, source in pairs(r.names) do
    if lost_events(base .. ':' .. source, last_id) then return true end
  end
  return false
end
