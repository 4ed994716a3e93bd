-- What an adoption wants to know of a stream before it is published to again.
-- KEYS stream, gate. Answers {1 if there is a gate, events it has let through, now in ms, the id of the last of them that is in
-- the stream ('' if none is known to be), 1 if the stream has forgotten some, 1 if it has some that the gate does not know of, the
-- gate's source and owner}. A replay adds to the stream past the gate: the stream's own last id may be younger than what is lost.
local gate = redis.call('TYPE', KEYS[2]).ok == 'hash'
local g = gate and redis.call('HMGET', KEYS[2], 'n', 'last', 'source', 'owner') or {}
local n, last, t = tonumber(g[1] or '0'), last_id_of(KEYS[1]), redis.call('TIME')
local gone = forgot(last, n, g[2])

-- The youngest entry that is no replay's, of those behind what the gate knows, and of the last thousand. Else the oldest of these.
local youngest, own, before = nil, nil, '+'
if last and last ~= '' then
  for _ = 1, 1000 do
    local page = redis.call('XREVRANGE', KEYS[1], before, '-', 'COUNT', 1)
    if #page == 0 or (g[2] and not forgot(g[2], 1, page[1][1])) then
      own, youngest = '', nil
      break
    end
    local id, fields, replayed = page[1][1], page[1][2], false
    for i = 1, #fields, 2 do replayed = replayed or fields[i] == 'replayed' end
    youngest, before = id, '(' .. id
    if not replayed then
      own = id
      break
    end
  end
end
if g[2] then
  if not gone then last = g[2] end
else
  last = own or ''
end
return {gate and 1 or 0, n, t[1] * 1000 + math.floor(t[2] / 1000), last or '', gone and 1 or 0, youngest and 1 or 0, g[3] or '',
  g[4] or ''}
