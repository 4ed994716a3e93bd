-- Publishes one numbered batch of a lane, once.
-- KEYS stream, register, gate, and those that an answer KEYS demands
-- ARGV epoch, nonce, lane, claim, claim's nonce, number, a claim of that nonce, the last of its batches that is
--      settled, events the gate is known to have let through, ids (16 bytes each), heads (per event 36 bytes of the
--      id's text, 27 of time), the entries' source field, pubsub ("" publishes none on its channel, "1" all, else a
--      digit per event), extended ("1"), what channels begin with, then per event type, subject, data and, if
--      extended, traceparent and headers ("" for none)
-- Answers {OK, done, suppressed, lost pubs, n, last}, with an error of PUBLISH if there was one, {XADD, the same,
-- error} when it stopped after the first events of the batch, {GAP}, {FENCED, epoch} or {KEYS, key…}. done is how many
-- events of the batch are accounted for, n how many the gate has let through, last the entry of the last of them.
local ID, HEAD, FIRST = 16, 63, 15
local stream, base, gate = KEYS[1], KEYS[2], KEYS[3]
local epoch, lane, claim, lnonce = ARGV[1], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local number, of, settled, least = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local ids, heads, esource = ARGV[10], ARGV[11], ARGV[12]
local pubsub, extended, prefix = ARGV[13], ARGV[14] == '1', ARGV[15]
local width = extended and 5 or 3
local count = math.floor(#ids / ID)
if #ARGV ~= FIRST + count * width or #heads ~= count * HEAD then
  return redis.error_reply('ERR wrong number of arguments for a batch')
end

local g, err = read('HMGET', gate, 'owner', 'l:' .. lane, 'doubt', 'n', 'last', 'len')
if err then return err end
local no = assess(g[1], epoch, ARGV[2])
if no then return no end
-- A gate with a lower count than the caller's went back in time, and the stream with it.
local n = tonumber(g[4] or '0')
if n < least then return {'GAP'} end

local last, gone = 0, 0
local oldclaim, oldlast, oldgone, known = nil, 0, 0, 0
if g[2] then
  local c, n, l, s = lane_of(g[2])
  if c > claim or (c == claim and n ~= lnonce) then return {'FENCED', epoch} end
  if c == claim then
    last, gone = l, s
  else
    oldclaim, oldlast, oldgone = c, l, s
    if c == of and n == lnonce then known = settled end
    -- The gate lacks settled batches.
    if of < claim and c < of or l < known then return {'GAP'} end
  end
end
if of ~= claim then settled = 0 end

local field = 'u:' .. lane .. ':' .. int(number)
local from = 0
if number == last and last > 0 then
  local stored = redis.call('HGET', gate, field)
  if not stored then return {'GAP'} end
  local kept = string.sub(stored, 2)
  local both = math.min(#kept, #ids)
  if string.sub(kept, 1, both) ~= string.sub(ids, 1, both) then return {'GAP'} end -- other events under this number
  from = math.floor(#kept / ID)
  if string.sub(stored, 1, 1) == '+' then return {'OK', from, 0, 0, n, g[5] or ''} end
  if from > count then ids = kept end
elseif number ~= last + 1 then
  return {'GAP'}
end

local wrong
local len = 0
if from < count then
  local t = redis.call('TYPE', stream).ok
  if t ~= 'none' and t ~= 'stream' then wrong = 'WRONGTYPE the key ' .. stream .. ' holds a ' .. t end
  -- The stream alone may have been deleted and created again.
  if not wrong then
    len = redis.call('XLEN', stream)
    if len == 0 or len < tonumber(g[6] or '0') then
      local gone, ask = deserted(stream, base, gate)
      if ask then return ask end
      if gone then return {'GAP'} end
    end
  end
end

-- From here on nothing fails. An earlier claim's batches are read before their fields are used again.
local doubtful = tonumber(g[3] or '0')
local inherited, drop = {}, {}
if oldclaim then
  for n = oldgone + 1, oldlast do
    local f = 'u:' .. lane .. ':' .. int(n)
    local b = n > known and redis.call('HGET', gate, f)
    if b then
      local origin = lane .. '|' .. int(oldclaim) .. '|' .. int(n)
      each(b, function(id)
        inherited[#inherited + 1] = 'd:' .. id
        inherited[#inherited + 1] = origin
      end)
    end
    if n ~= number then drop[#drop + 1] = f end
  end
end
settled = math.max(gone, math.min(settled, number - 1))
redis.call('HSET', gate, 'l:' .. lane, int(claim) .. '|' .. lnonce .. '|' .. int(number) .. '|' .. int(settled), field,
  '-' .. string.sub(ids, 1, from * ID))
hdel(gate, drop)
hdel(gate, unsettled(lane, gone, settled))
local before = doubtful
doubtful = doubtful + hset(gate, inherited)
if wrong then -- refused behind the claim: whoever had the lane before is fenced, though nothing was published
  if doubtful ~= before then set_doubt(gate, doubtful) end
  return {'XADD', from, 0, 0, n, g[5] or '', wrong}
end

local doubted = {}
if doubtful > 0 then
  for i = from + 1, count, CHUNK do
    local marks = {}
    for j = i, math.min(i + CHUNK - 1, count) do
      marks[#marks + 1] = 'd:' .. string.sub(ids, (j - 1) * ID + 1, j * ID)
    end
    local found = redis.call('HMGET', gate, unpack(marks))
    for j = 1, #marks do doubted[i + j - 1] = found[j] end
  end
end

local NONE = {}
local function extension(traceparent, headers)
  local fields = {}
  if traceparent ~= '' then fields[1], fields[2] = 'traceparent', traceparent end
  if headers ~= '' then fields[#fields + 1], fields[#fields + 2] = 'headers', headers end
  return fields
end

local sub, call = string.sub, redis.pcall
local taken, lost, done, failed, newest, refused = {}, 0, math.max(from, count), nil, nil, nil
for i = from + 1, count do
  local h, a = (i - 1) * HEAD, FIRST + (i - 1) * width
  if doubted[i] then
    taken[#taken + 1] = 'd:' .. sub(ids, (i - 1) * ID + 1, i * ID)
  else
    local r = call('XADD', stream, '*', 'id', sub(heads, h + 1, h + 36), 'type', ARGV[a + 1], 'source', esource,
      'subject', ARGV[a + 2], 'time', sub(heads, h + 37, h + 63), 'data', ARGV[a + 3], 'specversion', '1.0',
      unpack(extended and extension(ARGV[a + 4], ARGV[a + 5]) or NONE))
    if type(r) ~= 'string' then
      done, failed = i - 1, type(r) == 'table' and r.err or 'ERR XADD gave no entry id'
      break
    end
    n, len, newest = n + 1, len + 1, r
    if pubsub ~= '' then
      if pubsub ~= '1' and string.byte(pubsub, i) == 48 then
        lost = lost + 1
      else
        local p = call('PUBLISH', prefix .. ARGV[a + 1], ARGV[a + 3])
        if type(p) == 'table' then lost, refused = lost + 1, p.err end
      end
    end
  end
end

-- If all events were in the stream already, 'last' stays; an empty one is not written.
local state = {field, (failed and '-' or '+') .. sub(ids, 1, done * ID), 'n', int(n)}
if newest then state[5], state[6], state[7], state[8] = 'last', newest, 'len', int(len) end
redis.call('HSET', gate, unpack(state))
doubtful = doubtful - hdel(gate, taken)
if doubtful ~= before then set_doubt(gate, doubtful) end
local answer = {failed and 'XADD' or 'OK', done, #taken, lost, n, newest or g[5] or ''}
answer[7] = failed or refused
return answer
