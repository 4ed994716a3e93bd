-- Publishes one numbered batch of a lane, once.
-- KEYS stream, gate
-- ARGV source, epoch, nonce, lane, claim, claim's nonce, number, settled batch of the lane, events the gate is known to have
--      let through, heads, the entries' source field, pubsub ("" publishes none on its channel, "1" all, else a digit per
--      event), traced ("1"), what channels begin with, then per event type, subject, data and, if traced, traceparent. heads has per event 16 bytes of id, 36 of its text, 27 of time.
-- Answers {OK, batch, lost pubs, n}, {XADD, batch, lost pubs, n, error} when it stopped after the events in batch, {GAP},
-- {FENCED, epoch} or {FOREIGN, source}. batch is what the gate holds in u:, n how many events it has let through.
local HEAD, FIRST = 79, 14
local stream, gate = KEYS[1], KEYS[2]
local epoch, lane, claim, lnonce = ARGV[2], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local number, settled, least, heads, esource = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], ARGV[11]
local pubsub, traced, prefix = ARGV[12], ARGV[13] == '1', ARGV[14]
local width = traced and 4 or 3
local count = #heads / HEAD
if #ARGV ~= FIRST + count * width then return redis.error_reply('ERR wrong number of arguments for a batch') end

local g, err = read(gate, 'source', 'owner', 'l:' .. lane, 'doubt', 'n', 'last')
if err then return err end
local no = assess(g[1], g[2], ARGV[1], epoch, ARGV[3])
if no then return no end
-- A gate that knows of less than the caller does went back in time, and the stream with it.
local n = tonumber(g[5] or '0')
if n < least then return {'GAP'} end

local last, gone = 0, 0
local oldclaim, oldlast, oldgone
if g[3] then
  local c, n, l, s = lane_of(g[3])
  if c > claim or (c == claim and n ~= lnonce) then return {'FENCED', epoch} end
  if c == claim then last, gone = l, s else oldclaim, oldlast, oldgone = c, l, s end
end

local field = 'u:' .. lane .. ':' .. int(number)
local batch, from = '', 0
if number == last and last > 0 then
  local stored = redis.call('HGET', gate, field)
  if not stored then return {'GAP'} end
  batch = string.sub(stored, 2)
  if string.sub(stored, 1, 1) == '1' then return {'OK', batch, 0, n} end
  each(stored, function() from = from + 1 end)
elseif number ~= last + 1 then
  return {'GAP'}
end

local wrong
if from < count then
  local t = redis.call('TYPE', stream).ok
  if t ~= 'none' and t ~= 'stream' then wrong = 'WRONGTYPE the key of the stream holds a ' .. t end
  if t == 'none' and n > 0 then return {'GAP'} end -- somebody has deleted the stream alone
  if t == 'stream' and redis.call('XLEN', stream) == 0 and forgot(last_id_of(stream), n, g[6]) then return {'GAP'} end
end

-- From here on nothing fails. An earlier claim's batches are read before their fields are used again.
local doubtful = tonumber(g[4] or '0')
local inherited, drop = {}, {}
if oldclaim then
  for n = oldgone + 1, oldlast do
    local f = 'u:' .. lane .. ':' .. int(n)
    local b = redis.call('HGET', gate, f)
    if b then
      local origin = lane .. '|' .. int(oldclaim) .. '|' .. int(n) .. '|'
      each(b, function(id, entry)
        inherited[#inherited + 1] = 'd:' .. id
        inherited[#inherited + 1] = origin .. entry
      end)
      if n ~= number then drop[#drop + 1] = f end
    end
  end
end
settled = math.max(gone, math.min(settled, number - 1))
redis.call('HSET', gate, 'l:' .. lane, int(claim) .. '|' .. lnonce .. '|' .. int(number) .. '|' .. int(settled), field, '0' .. batch)
hdel(gate, drop)
hdel(gate, unsettled(lane, gone, settled))
local before = doubtful
doubtful = doubtful + hset(gate, inherited)
if wrong then -- refused behind the claim: whoever had the lane before is fenced, though nothing was published
  if doubtful ~= before then set_doubt(gate, doubtful) end
  return {'XADD', batch, 0, n, wrong}
end

local known = {}
if doubtful > 0 then
  for i = from + 1, count, CHUNK do
    local ids = {}
    for j = i, math.min(i + CHUNK - 1, count) do
      ids[#ids + 1] = 'd:' .. string.sub(heads, (j - 1) * HEAD + 1, (j - 1) * HEAD + 16)
    end
    local found = redis.call('HMGET', gate, unpack(ids))
    for j = 1, #ids do known[i + j - 1] = found[j] end
  end
end

local sub, char, call = string.sub, string.char, redis.pcall
local out, taken, lost, failed, newest = {batch}, {}, 0, nil, nil
for i = from + 1, count do
  local h, a = (i - 1) * HEAD, FIRST + (i - 1) * width
  local id = sub(heads, h + 1, h + 16)
  if known[i] then
    local entry = string.match(known[i], '[^|]*$')
    out[#out + 1] = id .. char(128 + #entry) .. entry
    taken[#taken + 1] = 'd:' .. id
  else
    local r
    if traced and ARGV[a + 4] ~= '' then
      r = call('XADD', stream, '*', 'id', sub(heads, h + 17, h + 52), 'type', ARGV[a + 1], 'source', esource,
        'subject', ARGV[a + 2], 'time', sub(heads, h + 53, h + 79), 'data', ARGV[a + 3], 'traceparent', ARGV[a + 4])
    else
      r = call('XADD', stream, '*', 'id', sub(heads, h + 17, h + 52), 'type', ARGV[a + 1], 'source', esource,
        'subject', ARGV[a + 2], 'time', sub(heads, h + 53, h + 79), 'data', ARGV[a + 3])
    end
    if type(r) ~= 'string' then
      failed = type(r) == 'table' and r.err or 'ERR XADD gave no entry id'
      break
    end
    out[#out + 1] = id .. char(#r) .. r
    n, newest = n + 1, r
    if pubsub ~= '' then
      if pubsub ~= '1' and string.byte(pubsub, i) == 48 then
        lost = lost + 1
      elseif type(call('PUBLISH', prefix .. ARGV[a + 1], ARGV[a + 3])) == 'table' then
        lost = lost + 1
      end
    end
  end
end

batch = table.concat(out)
-- Events that were there already leave 'last' as it is. An empty one is none: it is not written.
local state = {field, (failed and '0' or '1') .. batch, 'n', int(n)}
if newest then state[5], state[6] = 'last', newest end
redis.call('HSET', gate, unpack(state))
doubtful = doubtful - hdel(gate, taken)
if doubtful ~= before then set_doubt(gate, doubtful) end
if failed then return {'XADD', batch, lost, n, failed} end
return {'OK', batch, lost, n}
