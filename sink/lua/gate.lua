-- Put in front of every script of the gate.
--
-- Each database has a gate for each stream, {<stream>}:gate:<source>; source is the database's uuid. It is a hash:
--   owner      epoch|nonce of the leadership
--   reg        the id of the stream's register under which the gate was made; see register.lua
--   l:<lane>   claim|nonce|last batch|settled batch; a lane is "s", "r" (events that are restored) or a part's number
--   u:<lane>:<number>  an unsettled batch: "+" (complete) or "-", then 16 bytes of id for each event in the stream
--   d:<id>     an event in doubt, and where it came from: "a" for an adoption, "<lane>|<claim>|<number>" for a batch of
--              an earlier claim of a part
--   doubt      the number of d: fields; absent means 0
--   n          the number of events that the gate has let through; it begins at 0 again when the stream has lost them
--   base       how many entries were added to the stream beyond these events at the last adoption; others only add
--              entries. Absent if the server does not count them
--   len        the length of the stream after the last publish: it is shorter if it was trimmed, or lost entries
--   last       the entry id of the last of these events
--   gone       set by the adoption of another database that has found the stream without this gate's events: up to
--              where the stream was as before then, '' if that is not known. It is lowered if the stream loses more.
--              The owner is then the epoch before, without a nonce: every call is refused until an adoption with a
--              higher epoch
--   confirmed  written by the barrier only
--
-- Redis does not undo what a script wrote before it failed, so everything that can fail comes before the first write,
-- and the first write is one that Redis refuses when it is out of memory.

local unpack = table.unpack or unpack -- its name in Lua 5.4 and in 5.1

-- More values than this do not fit on Lua's stack in one call.
local CHUNK = 500

local function int(n) return string.format('%.0f', n) end

-- read reads from a gate or a register. It returns an error reply if the key is not a hash.
local function read(command, key, ...)
  local g = redis.pcall(command, key, ...)
  if not g.err then return g end
  if string.sub(g.err, 1, 9) == 'WRONGTYPE' then
    return nil, redis.error_reply('GATETYPE the key of the gate holds something else')
  end
  return nil, redis.error_reply(g.err)
end

-- owner_of splits an owner into epoch and nonce.
local function owner_of(v)
  local e, n = string.match(v, '^(%d+)|(%x+)$')
  return tonumber(e), n
end

-- assess returns nil if the gate belongs to the caller, else the answer to give.
local function assess(owner, epoch, nonce)
  if not owner then return {'GAP'} end
  local theirs, n = owner_of(owner)
  local mine = tonumber(epoch)
  if theirs > mine or (theirs == mine and n ~= nonce) then return {'FENCED', int(theirs)} end
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

-- lacks reports whether a stream has lost an entry that it had: the stream was deleted, or put back to an earlier
-- state, and may have been made again since. last_id is the last id that the stream gave, '' without a stream. No entry
-- is never lost.
local function lacks(last_id, entry)
  if not entry or entry == '' then return false end
  return last_id == '' or less(last_id, entry)
end
