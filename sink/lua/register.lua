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

-- excludes reports whether two databases exclude each other: one of them does not share the stream, or both have the
-- same name.
local function excludes(r, other, name, alone) return alone or r.alone or other == name end

-- foreign_to returns what the scripts answer a database that others exclude: {FOREIGN, source, names, "1" if that
-- database does not share the stream}; nil if none does.
local function foreign_to(r, source, name, alone)
  local names = {}
  for other, theirs in pairs(r.names) do
    if theirs ~= source and excludes(r, other, name, alone) then names[#names + 1] = other end
  end
  table.sort(names)
  return names[1] and {'FOREIGN', r.names[names[1]], table.concat(names, ', '), r.alone and '1' or ''} or nil
end

-- state_of returns what a server tells of a stream; last is the last id that it gave, '' if there is no stream.
local function state_of(stream)
  if redis.call('TYPE', stream).ok ~= 'stream' then return {key = stream, last = ''} end
  local s = fields(redis.call('XINFO', 'STREAM', stream))
  s.key, s.last = stream, s['last-generated-id']
  return s
end

-- misses reports whether a stream has lost an entry that it had, though others may have added younger ones since. Trims
-- take the oldest entries, and what is deleted one by one is counted. Servers before Redis 7 tell of the last id only.
local function misses(s, entry)
  if not entry or entry == '' then return false end
  if lacks(s.last, entry) then return true end
  local added, first = s['entries-added'], s['first-entry']
  if not added or not first or redis.call('XRANGE', s.key, entry, entry)[1] then return false end
  return added == s['length'] or less(first[1], entry) and less(s['max-deleted-entry-id'], entry)
end

-- kept returns up to where a stream that has lost its younger entries is as it was: its last id, if its last entry is
-- that of a registered database, else ''. A stream may only have an entry of another writer.
local function kept(s, r)
  local e = s['last-entry']
  return e and r.names[fields(e[2])['source'] or ''] and s.last or ''
end

-- short reports whether fewer entries were added to a stream than a gate knows of.
local function short(s, n, base)
  local added = s['entries-added']
  return added and base and added < tonumber(base) + tonumber(n or '0') or false
end

-- lost_events reports whether a stream has lost events of a gate that are not noted in it as "gone".
local function lost_events(gate, s)
  local g = redis.call('HMGET', gate, 'last', 'gone', 'n', 'base')
  return misses(s, g[1]) or lacks(s.last, g[2]) or short(s, g[3], g[4])
end

-- undeclared returns {KEYS, key…} with the keys that the call does not declare; nil if it declares all. Some servers
-- refuse them. The caller repeats the call and declares them.
local function undeclared(keys)
  local declared, answer = {}, {'KEYS'}
  for _, key in ipairs(KEYS) do declared[key] = true end
  for _, key in ipairs(keys) do
    if not declared[key] then answer[#answer + 1] = key end
  end
  return answer[2] and answer or nil
end

-- gates_of returns the keys of the gates of a register.
local function gates_of(r, base)
  local keys = {}
  for _, source in pairs(r.names) do keys[#keys + 1] = base .. ':' .. source end
  return keys
end

-- deserted reports whether a stream lacks events of any gate, or whether the caller's gate does not count. The second
-- result is an answer that demands keys first.
local function deserted(stream, base, gate)
  local r = register_of(base)
  if not r or not r.id or r.id ~= redis.call('HGET', gate, 'reg') then return true end
  local ask = undeclared(gates_of(r, base))
  if ask then return false, ask end
  local s = state_of(stream)
  for _, source in pairs(r.names) do
    if lost_events(base .. ':' .. source, s) then return true end
  end
  return false
end
