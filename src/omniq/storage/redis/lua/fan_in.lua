--[[
Fan-in: members of a key are counted once each.

  {cc:<key>}:count   string  how many are missing; shared with every client of the contract
  {cc:<key>}:done    set     who was counted; both are deleted with the last one
  {cc:<key>}:o       hash    ours: expected, expires_ms, and "m:<member>" with what that member heard. It outlives the count, so
                             that a member that asks again, the last one too, hears the same.
]]

local FAN_IN_MS = 86400000 -- how long we remember one that another client opened

local function fan_in(key)
  local base = '{cc:' .. key .. '}:'
  local found = run('HMGET', base .. 'o', 'expected', 'expires_ms')
  local f = {count = base .. 'count', done = base .. 'done', o = base .. 'o', expected = found[1] and number(found[1])}
  if f.expected and number(found[2]) <= now then
    run('DEL', f.count, f.done, f.o)
    f.expected = nil
  end
  f.left = run('GET', f.count)
  f.left = f.left and number(f.left)
  if f.left and not f.expected then f.expected = f.left + run('SCARD', f.done) end
  return f
end

local function remember(f, ttl_ms, ...)
  run('HSET', f.o, 'expected', f.expected, ...)
  run('HSETNX', f.o, 'expires_ms', digits(now + ttl_ms))
  if run('PTTL', f.o) < 0 then run('PEXPIRE', f.o, digits(ttl_ms + GRACE_MS)) end
end

function alone.openfanin(op)
  local f = fan_in(op.key)
  if f.expected and f.expected ~= op.expected then return nil, 'IdempotencyConflict' end
  if f.expected then return {f.left or 0} end
  f.expected = op.expected
  run('DEL', f.done)
  run('SET', f.count, op.expected, 'PX', digits(op.ttl + GRACE_MS))
  remember(f, op.ttl)
  return {op.expected}
end

function alone.countfanin(op)
  local f = fan_in(op.key)
  local heard = run('HGET', f.o, 'm:' .. op.member)
  if heard then return {number(heard)} end
  if not f.left then return {-1} end
  if run('SADD', f.done, op.member) == 0 then return {f.left} end -- another client counted it
  local left = math.max(f.left - 1, 0)
  if left > 0 then
    run('DECR', f.count)
    local ttl = run('PTTL', f.count)
    if ttl > 0 then run('PEXPIRE', f.done, ttl) end
  else
    run('DEL', f.count, f.done)
  end
  remember(f, FAN_IN_MS, 'm:' .. op.member, left)
  return {left}
end
