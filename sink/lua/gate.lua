-- Put in front of every script of the gate.
--
-- The gate is a hash:
--   source     uuid of the database that publishes here
--   owner      epoch|nonce of the leadership
--   l:<lane>   claim|nonce|last batch|settled batch; a lane is "s", "r" (what is restored) or a part's number
--   u:<lane>:<number>  an unsettled batch: "+" (complete) or "-", then 16 bytes of id for each event that is in the stream
--   d:<id>     an event in doubt: where it came from. "a" for what an adoption found, "<lane>|<claim>|<number>" for what an
--              earlier claim of a part left
--   doubt      how many d: fields there are; absent means none
--   n          how many events it has let through; begins anew where the stream has forgotten them
--   last       the entry id of the last of them
--   confirmed  written by the barrier only
--
-- Redis does not undo what a script wrote before it failed, so everything that can fail comes before the first write,
-- and the first write is one that Redis refuses when it is out of memory.

-- More values than this do not fit on Lua's stack in one call.
local CHUNK = 500

local function int(n) return string.format('%.0f', n) end

-- read returns the named fields, or an error reply if the key is not a hash.
local function read(gate, ...)
  local g = redis.pcall('HMGET', gate, ...)
  if g.err then
    if string.sub(g.err, 1, 9) == 'WRONGTYPE' then
      return nil, redis.error_reply('GATETYPE the key of the gate holds something else')
    end
    return nil, redis.error_reply(g.err)
  end
  return g
end

-- assess returns nil if the gate belongs to the caller, else the answer to give.
local function assess(gsource, gowner, source, epoch, nonce)
  if not gsource or not gowner then return {'GAP'} end
  if gsource ~= source then return {'FOREIGN', gsource} end
  local e, n = string.match(gowner, '^(%d+)|(%x+)$')
  local theirs, mine = tonumber(e), tonumber(epoch)
  if theirs > mine or (theirs == mine and n ~= nonce) then return {'FENCED', e} end
  if theirs < mine then return {'GAP'} end
  return nil
end

-- lane_of splits a lane's field into claim, nonce, last and settled.
local function lane_of(v)
  local c, n, last, settled = string.match(v, '^(%d+)|(%x+)|(%d+)|(%d+)$')
  return tonumber(c), n, tonumber(last), tonumber(settled)
end

-- each calls f(id) for every event of an unsettled batch.
local function each(batch, f)
  for at = 2, #batch, 16 do f(string.sub(batch, at, at + 15)) end
end

-- hset writes pairs (field, value, field, value, …) and returns how many fields are new.
local function hset(gate, pairs)
  local new = 0
  for i = 1, #pairs, 2 * CHUNK do
    new = new + redis.call('HSET', gate, unpack(pairs, i, math.min(i + 2 * CHUNK - 1, #pairs)))
  end
  return new
end

-- hdel removes fields and returns how many there were.
local function hdel(gate, fields)
  local gone = 0
  for i = 1, #fields, CHUNK do
    gone = gone + redis.call('HDEL', gate, unpack(fields, i, math.min(i + CHUNK - 1, #fields)))
  end
  return gone
end

-- unsettled lists the fields of a lane's batches after from, up to and including to.
local function unsettled(lane, from, to)
  local fields = {}
  for n = from + 1, to do fields[#fields + 1] = 'u:' .. lane .. ':' .. int(n) end
  return fields
end

local function set_doubt(gate, n)
  if n > 0 then redis.call('HSET', gate, 'doubt', int(n)) else redis.call('HDEL', gate, 'doubt') end
end

-- forgot tells whether the stream lacks what its gate has let through: somebody has deleted it, and a consumer or a replay may
-- have made it anew. last_id is the last id that the stream gave, '' without one.
local function forgot(last_id, n, last)
  if last_id == '' then return n > 0 or (last and last ~= '') end
  if not last then return false end
  local a, b = string.match(last_id, '(%d+)-(%d+)')
  local c, d = string.match(last, '(%d+)-(%d+)')
  a, b, c, d = tonumber(a), tonumber(b), tonumber(c), tonumber(d)
  return a < c or (a == c and b < d)
end

-- last_id_of returns the last id that a stream gave, '' if there is no stream.
local function last_id_of(stream)
  if redis.call('TYPE', stream).ok ~= 'stream' then return '' end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
end
