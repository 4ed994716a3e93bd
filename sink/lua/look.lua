-- What an adoption wants to know of a stream before it is published to again.
-- KEYS stream, the gate of one that is not shared, where it is shared this source's. ARGV source, the source field of this database's entries if it shares the
-- stream, else ''
-- Answers {1 if there is a gate, events it has let through, now in ms, the id of the last of them that is in
-- the stream ('' if none is known to be), 1 if the stream has forgotten some, 1 if it has some that the gate does not know of, 2 if
-- that takes a longer look, the gate's source and owner}. A replay adds to the stream past the gate: the stream's own last id may
-- be younger than what is lost. So do those who share it.
local base, name = KEYS[2], ARGV[2]
local key, b = nil, redis.call('TYPE', base).ok == 'hash' and redis.call('HGET', base, 'source')
if b == SHARED then
  local own = base .. ':' .. ARGV[1]
  if register_of(base) == redis.call('HGET', own, 'reg') then key = own end
elseif b and (name == '' or b == ARGV[1]) then
  key = base
end
local gate = key ~= nil
local g = gate and redis.call('HMGET', key, 'n', 'last', 'source', 'owner', 'gone') or {}
local n, last, t = tonumber(g[1] or '0'), last_id_of(KEYS[1]), redis.call('TIME')
if receded(last, g[5]) then g[5] = last end
local gone = g[5] or forgot(last, n, g[2])

-- The youngest entry that is this database's and no replay's, of those behind what the gate knows, and of the last thousand.
local youngest, own, before = nil, nil, '+'
if last and last ~= '' then
  for _ = 1, 1000 do
    local page = redis.call('XREVRANGE', KEYS[1], before, '-', 'COUNT', 1)
    if #page == 0 or (g[2] and not forgot(g[2], 1, page[1][1])) then
      own, youngest = '', nil
      break
    end
    local id, fields, mine = page[1][1], page[1][2], name == ''
    for i = 1, #fields, 2 do
      if fields[i] == 'source' and fields[i + 1] == name then mine = true end
    end
    for i = 1, #fields, 2 do mine = mine and fields[i] ~= 'replayed' end
    youngest, before = id, '(' .. id
    if mine then
      own = id
      break
    end
  end
end
local behind = youngest and 1 or 0
if youngest and not own and name ~= '' then behind = 2 end
if g[2] then
  if not gone then last = g[2] end
elseif not g[5] then
  last = own or ''
end
if g[5] then last = g[5] end
return {gate and 1 or 0, n, t[1] * 1000 + math.floor(t[2] / 1000), last or '', gone and 1 or 0, behind, g[3] or '', g[4] or ''}
