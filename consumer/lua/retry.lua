-- Takes an entry out of a dead stream and gives it back to its group.
-- KEYS[1] stream, KEYS[2] dead stream, KEYS[3] the stream's register, then its gates; ARGV dead entry's id, group,
-- original entry's id.
-- Returns 'gone' (no such dead entry), 'pending' (delivered again to the group alone), 'added' (the original entry was
-- trimmed, so the event was added to the stream again, marked as replayed and for this group) or 'unrestored' (it must
-- be added, and the stream lacks events that a relay has published; nothing was changed). If gates are not declared, it
-- returns their keys and changes nothing.
local unpack = table.unpack or unpack -- its name in Lua 5.4 and in 5.1

-- less compares entry ids as text: their halves may be larger than a double holds exactly.
local function less(a, b)
  local am, as = string.match(a, '^(%d+)-(%d+)$')
  local bm, bs = string.match(b, '^(%d+)-(%d+)$')
  if #am ~= #bm then return #am < #bm end
  if am ~= bm then return am < bm end
  if #as ~= #bs then return #as < #bs end
  return as < bs
end

-- unrestored reports whether the stream lacks events that a relay has published: it was deleted, or put back to an
-- earlier state, and may have been made again since. A relay recognizes the loss by the last id that the stream gave,
-- and a new entry raises that id. So an entry may be added only after the relay has restored the events. A gate has the
-- last id that it has let through as "last" and, after a loss that another database has noticed, the last id of that
-- time as "gone". The gate of a database is <register>:<source>, and the register has the sources; see the scripts of
-- package sink.
local function unrestored(stream, base)
  local declared, ask = {}, {}
  for _, key in ipairs(KEYS) do declared[key] = true end
  if redis.call('TYPE', base).ok ~= 'hash' then return false end
  local last_id = '0-0'
  if redis.call('EXISTS', stream) == 1 then
    local info = redis.call('XINFO', 'STREAM', stream)
    for i = 1, #info, 2 do
      if info[i] == 'last-generated-id' then last_id = info[i + 1] end
    end
  end
  local gates, register = {}, redis.call('HGETALL', base)
  for i = 1, #register, 2 do
    if string.sub(register[i], 1, 2) == 's:' then gates[#gates + 1] = base .. ':' .. register[i + 1] end
  end
  for _, gate in ipairs(gates) do
    if not declared[gate] then ask[#ask + 1] = gate end
  end
  if ask[1] then return ask end
  for _, gate in ipairs(gates) do
    for _, id in ipairs(redis.call('HMGET', gate, 'last', 'gone')) do
      if id and id ~= '' and less(last_id, id) then return true end
    end
  end
  return false
end

local d = redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not d then return 'gone' end
-- An error here says that the group is gone. Pending already: a consumer has it.
local pending = redis.call('XPENDING', KEYS[1], ARGV[2], ARGV[3], ARGV[3], 1)[1]
if pending then
  redis.call('XDEL', KEYS[2], ARGV[1])
  return 'pending'
end
if redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1] then
  -- Idle for a day: the next consumer that checks may claim it.
  redis.call('XCLAIM', KEYS[1], ARGV[2], 'retry', 0, ARGV[3], 'IDLE', 86400000, 'RETRYCOUNT', 0, 'FORCE', 'JUSTID')
  redis.call('XDEL', KEYS[2], ARGV[1])
  return 'pending'
end
local lacks = unrestored(KEYS[1], KEYS[3])
if lacks then return lacks == true and 'unrestored' or lacks end
local add = {'XADD', KEYS[1], '*', 'replayed', '1', 'for_group', ARGV[2]}
for i = 1, #d[2], 2 do
  local f = d[2][i]
  if string.sub(f, 1, 5) ~= 'dead_' and f ~= 'replayed' and f ~= 'for_group' then
    add[#add + 1] = f
    add[#add + 1] = d[2][i + 1]
  end
end
redis.call(unpack(add))
redis.call('XDEL', KEYS[2], ARGV[1])
return 'added'
