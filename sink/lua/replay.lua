-- Publishes entries of history again, once: the entries and how far the replay is are one step.
--
-- The record is a hash: owner (the process that replays) and cursor (the place in history of the last entry published;
-- '' before the first). It is no part of the gate, and nothing here writes the gate.
-- KEYS stream, register, gate, record, and those that an answer KEYS demands
-- ARGV side ("1": a stream without a relay), database's uuid, owner, ms to live, the entries' source field, from (the
--      cursor the caller knows, '?' to take the record over), then per entry place, id, type, subject, time, data,
--      traceparent and headers ("" for none)
-- Answers {OK, cursor}, {XADD, cursor, error} when it stopped behind cursor, {GONE}, {TAKEN},
-- {MOVED, cursor}, {TYPE, type}, {LIVE}, {FOREIGN, source, name} or {KEYS, key…}.
local stream, base, gate, record = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local side, source, owner, ttl, esource, from = ARGV[1] == '1', ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local FIRST, WIDTH = 6, 8
local entries = (#ARGV - FIRST) / WIDTH
if entries ~= math.floor(entries) then return redis.error_reply('ERR wrong number of arguments for a replay') end

local t = redis.call('TYPE', stream).ok
if t ~= 'none' and t ~= 'stream' then return {'TYPE', t} end
local reg, err = register_of(base)
if err then return err end
local name, other = next(reg.names)
if name then
  if side then return {'LIVE'} end
  local ours = false
  for _, theirs in pairs(reg.names) do ours = ours or theirs == source end
  if not ours then return {'FOREIGN', other, name} end
  -- A relay has to notice that its stream is gone before the replay makes it again.
  if redis.call('XLEN', stream) == 0 then
    local gone, ask = deserted(stream, base, gate)
    if ask then return ask end
    if gone then return redis.error_reply('TRYAGAIN the stream is gone, and its relay has not restored it yet') end
  end
end

local r = redis.call('HMGET', record, 'owner', 'cursor')
local cursor = r[2] or ''
if from == '?' then
  redis.call('HSET', record, 'owner', owner, 'cursor', cursor)
  redis.call('PEXPIRE', record, ttl)
  return {'OK', cursor}
end
if not r[1] then return {'GONE'} end
if r[1] ~= owner then return {'TAKEN'} end
if entries == 0 then return {'OK', cursor} end
-- The reply to the same call was lost: continue after what it did.
local first = 0
if cursor ~= from then
  for i = 0, entries - 1 do
    if cursor == ARGV[FIRST + i * WIDTH + 1] then first = i + 1 end
  end
  if first == 0 then return {'MOVED', cursor} end
  if first == entries then return {'OK', cursor} end
end

-- From here on only an XADD can fail. Without memory, Redis refuses this first write.
redis.call('HSET', record, 'owner', owner)
local failed
for i = first, entries - 1 do
  local a = FIRST + i * WIDTH
  local e = {'XADD', stream, '*', 'id', ARGV[a + 2], 'type', ARGV[a + 3], 'source', esource, 'subject', ARGV[a + 4],
    'time', ARGV[a + 5], 'data', ARGV[a + 6], 'specversion', '1.0'}
  for i, name in ipairs({'traceparent', 'headers'}) do
    if ARGV[a + 6 + i] ~= '' then
      e[#e + 1] = name
      e[#e + 1] = ARGV[a + 6 + i]
    end
  end
  e[#e + 1] = 'replayed'
  e[#e + 1] = '1'
  local added = redis.pcall(unpack(e))
  if type(added) ~= 'string' then
    failed = type(added) == 'table' and added.err or 'ERR XADD gave no entry id'
    break
  end
  cursor = ARGV[a + 1]
end
redis.call('HSET', record, 'cursor', cursor)
redis.call('PEXPIRE', record, ttl)
if failed then return {'XADD', cursor, failed} end
return {'OK', cursor}
