-- Reads the state of a stream that an adoption needs before the first publish.
-- KEYS stream, register, gate
-- ARGV source, the source field of this database's entries, alone ("1": it does not share the stream), the last entry
--      that Postgres knows of, '' for none
-- Answers {1 if there is a gate, the events that it has let through, now in ms, the id of the last of them that is in
-- the stream ('' if none is known to be), 1 if the stream has lost some, 1 if it has some that the gate does not know
-- (2: that takes a longer scan), the gate's owner, 1 if Postgres has gone back}, or FOREIGN: see foreign_to. A replay
-- and other databases add entries that the gate does not know: the stream's own last id may be younger than what is
-- lost.
local stream, base, source, name, alone = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3] == '1'
local r, err = register_of(base)
if err then return err end
local foreign = foreign_to(r, source, name, alone)
if foreign then return foreign end
local g
g, err = read('HMGET', KEYS[3], 'n', 'last', 'owner', 'gone', 'base', 'reg')
if err then return err end
local key = r.id and r.id == g[6] and KEYS[3]
if not key then g = {} end
local n, s, t = tonumber(g[1] or '0'), state_of(stream), redis.call('TIME')
local last, gone = s.last, g[4]
if lacks(last, gone) then gone = kept(s, r) end
local missed = misses(s, g[2]) or short(s, n, g[5])
local lost = gone or missed or misses(s, ARGV[4])

-- The youngest entry that is this database's and no replay's, of those that the gate does not know, and of the last
-- thousand.
local youngest, own, before = nil, nil, '+'
if last ~= '' then
  for _ = 1, 1000 do
    local page = redis.call('XREVRANGE', stream, before, '-', 'COUNT', 1)
    if #page == 0 or (g[2] and not lacks(g[2], page[1][1])) then
      own, youngest = '', nil
      break
    end
    local id, f = page[1][1], page[1][2]
    local mine = alone
    for i = 1, #f, 2 do
      if f[i] == 'source' and f[i + 1] == name then mine = true end
    end
    for i = 1, #f, 2 do mine = mine and f[i] ~= 'replayed' end
    youngest, before = id, '(' .. id
    if mine then
      own = id
      break
    end
  end
end
local behind = youngest and 1 or 0
if youngest and not own and not alone then behind = 2 end
if gone then
  last = gone
elseif not lost then
  last = g[2] or own or ''
elseif g[2] and not missed then
  last = g[2] -- of the last entries the gate does not know either
elseif lacks(last, g[2]) or lacks(last, ARGV[4]) then
  last = kept(s, r)
else
  last = '' -- there are younger entries: which of the older ones are left is not known
end

-- Postgres has gone back if it does not know an entry that is settled: among the next thousand after its last, one that
-- the gate has let through, and does not hold as unsettled.
local function byte(hex) return string.char(tonumber(hex, 16)) end
local function went_back(gate, after)
  local all, unsettled = fields(redis.call('HGETALL', gate)), {}
  for field, value in pairs(all) do
    if string.sub(field, 1, 2) == 'u:' then each(value, function(event) unsettled[event] = true end) end
    if string.sub(field, 1, 2) == 'd:' then unsettled[string.sub(field, 3)] = true end
  end
  for _ = 1, 1000 do
    local page = redis.call('XRANGE', stream, '(' .. after, '+', 'COUNT', 1)
    if #page == 0 or lacks(all.last, page[1][1]) then return false end
    local f = fields(page[1][2])
    after = page[1][1]
    local id = string.gsub(string.gsub(f.id or '', '-', ''), '%x%x', byte)
    if #id == 16 and not f.replayed and (alone or f.source == name) and not unsettled[id] then return true end
  end
  return false
end
local back = key and ARGV[4] ~= '' and not lost and lacks(ARGV[4], g[2]) and went_back(key, ARGV[4])
return {key and 1 or 0, n, t[1] * 1000 + math.floor(t[2] / 1000), last, lost and 1 or 0, behind, g[3] or '',
  back and 1 or 0}
