--[[
The keys of a queue. `base` is the queue's name in braces, so that all of its keys share one cluster slot.

Shared with every client of the contract:

  base:job:<id>          hash    a task; one that is done stays as long as its result, a job of another client as long as it is listed
  base:wait              list    ungrouped lane; RPUSH at the tail, LPOP at the head
  base:g:<gid>:wait      list    the lane of a group
  base:g:<gid>:limit     string  how many of the group may run; absent means 1
  base:g:<gid>:inflight  string  how many run; absent means 0
  base:groups:ready      zset    groups with work and a free slot; score: when they became ready, in ms
  base:has_groups        string  set by the first grouped enqueue
  base:active            zset    leased tasks; score: end of the lease, in ms
  base:delayed           zset    tasks that wait for a time; score: that time, in ms
  base:completed         list    newest first, trimmed to 100
  base:failed            list    newest first: dead letters
  base:paused            string  there: the queue grants nothing
  base:lane:rr           string  0: groups have the next turn, 1: ungrouped tasks
  base:stats             hash    counters for monitors
  base:idx:<state>       zset    who is in wait, active, delayed, failed, completed; score: since when

Ours alone; other clients work without them:

  base:o:meta            hash    seq, events (last number), first (oldest event kept), turn (last score in groups:ready), swept
  base:o:tasks           zset    every task that we know, by seq, the order of insertion
  base:o:end:<id>        hash    a task that was cancelled, until its result expires
  base:o:done, :cancelled, :results   zset    ended tasks, and results of tasks that go on; score: when they expire, or inf for a
                                 job that the contract ended: it goes with its entry in `completed`
  base:o:res:<id>        string  how the last run ended: a line of numbers, the error as JSON, the result
  base:o:blocked         zset    tasks that wait for others
  base:o:deps:<id>       zset    who waits for this task, as "queue id"; score: seq
  base:o:deferred        hash    ended tasks whose dependents are not all told yet: 1 if they have to die
  base:o:moved:<id>      string  the dead queue that a task went to
  base:o:key:<key>, o:keys   string, zset    idempotency keys, and when they expire
  base:o:staged          hash    tasks of runs that are not committed, by id; nothing else of them is there but their key
  base:o:claims          hash    staged tasks that further runs want too, by id
  base:o:run:<run>       hash    a staged run; base:o:rows:<run> list: the ids of its tasks, in order
  base:o:runs            zset    runs with tasks to release or to drop; score: from when on, 0 at once
  base:o:ended           zset    runs that are over; score: when they may be forgotten
  base:o:lanes           zset    names of groups
  base:o:rest:<gid>      string  since when a group with a limit is known to have no tasks
  base:o:corrupt         hash    jobs that were put aside, and why: dead letters, and those whose id or key nobody can use
  base:o:events          stream  one entry per call, "<last number>-0"

  {omniq.store}:queues, :workers, :ids, :info   set, hash, string, hash    what belongs to no queue
]]

local COMPLETED_KEEP = 100 -- all clients of the contract trim to this, so another number would not last
local CASCADE_LIMIT = 1000 -- dependents of one transaction, as the driver contract says
local PROMOTE_LIMIT = 1000 -- the same of tasks that fall due: the server serves nobody else meanwhile
local DEFAULT_LEASE_MS = 60000 -- what a stored timeout of nothing means
local DEFAULT_TTL_MS = 86400000
local GRACE_MS = 3600000 -- results outlive their time by this much if nobody purges
local MOVED_MS = 86400000 -- how long a task that went to its dead queue is found under its old one
local MAX_MS = 9999999999999 -- the year 2286
local MAX_WHOLE = 2 ^ 53 -- a larger number is not exact, and comes out of `digits` as another one
local PART = 4000 -- arguments of one variadic command: Lua's `unpack` gives up at some 8,000
local BUDGET = 50000 -- keys that a call looks up in other queues before it leaves its next transactions to another call
local LOOKUPS = 30000 -- more of them at once, and the books of the queues are asked instead
local PER_MS = 2048 -- numbers of tasks, and turns of groups, that fit into one millisecond
local STORE = '{omniq.store}:'

request = request or cmsgpack.unpack(ARGV[1])
local call = redis.call
local now = request.now
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Lua's own conversion writes large numbers with an exponent.
local function digits(number)
  return string.format('%d', number)
end

local NOW = digits(now)

-- Small numbers as text: most sizes come again and again.
local TEXT = setmetatable({}, {
  __index = function(known, n)
    local found = digits(n)
    known[n] = found
    return found
  end,
})

local function text(value)
  if value and value ~= '' then return value end
  return nil
end

-- Other clients may have stored anything. What is no number, or NaN, is 0.
local function number(value)
  local n = tonumber(value or 0)
  if not n or n ~= n then return 0 end
  if n > MAX_WHOLE then return MAX_WHOLE end
  if n < -MAX_WHOLE then return -MAX_WHOLE end
  return n
end

-- A time, a duration or a count: whole, and never negative.
local function ms(value)
  local n = tonumber(value or 0)
  if not n or n ~= n or n < 0 then return 0 end
  if n > MAX_MS then return MAX_MS end
  return n - n % 1
end

-- A moment as text; one that cannot be read was never stored.
local function moment(value)
  if value and string.find(value, '^%d+$') and #value <= 18 then return value end
  return nil
end

-- Whether a name is text that every program can say, and say back.
local function is_text(value)
  if value == '' then return false end
  if not string.find(value, '[%z\128-\255]') then return true end
  if string.find(value, '%z') then return false end
  for _, sequence in ipairs({
    '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]',
    '\237[\128-\159][\128-\191]', '\240[\144-\191][\128-\191][\128-\191]',
    '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]',
  }) do value = string.gsub(value, sequence, '.') end
  return not string.find(value, '[\128-\255]')
end

local function in_parts(command, key, list)
  for i = 1, #list, PART do
    call(command, key, unpack(list, i, math.min(i + PART - 1, #list)))
  end
end

local function append(list, values)
  for _, value in ipairs(values) do list[#list + 1] = value end
  return list
end

local queues = {}

local function queue(name)
  local q = queues[name]
  if not q then
    local base = '{' .. name .. '}:'
    q = {
      name = name, base = base, o = base .. 'o:', job = base .. 'job:', events = {}, completed = {}, failed = {}, lanes = {},
      grouped = 0, add = {}, remove = {}, ahead = {},
    }
    queues[name] = q
  end
  return q
end

local function meta(q)
  if not q.seq then
    local found = call('HMGET', q.o .. 'meta', 'seq', 'events', 'turn')
    q.seq, q.last_event, q.turn = number(found[1]), number(found[2]), number(found[3])
  end
  return q
end

-- `least`: for a task that must come after one of another queue.
local function next_seq(q, least)
  meta(q)
  q.seq = math.max(q.seq + 1, now * PER_MS, least or 0)
  q.changed_meta = true
  return q.seq
end

-- A fraction of a millisecond keeps groups that became ready together in order, instead of by name.
local function next_turn(q)
  meta(q)
  q.turn = math.max(q.turn + 1 / PER_MS, now)
  q.changed_meta = true
  return q.turn
end

local function job_key(q, id) return q.job .. id end
local function end_key(q, id) return q.o .. 'end:' .. id end

-- Whom this call concerns, told when everything is written.
local ready_queues, ended_tasks = {}, {}
